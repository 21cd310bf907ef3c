"""What an output must look like, as plain data that travels between processes."""

from __future__ import annotations

from typing import Literal

import msgspec


class Grammar(msgspec.Struct, frozen=True):
    """source: the text of a JSON schema, a pattern (Rust's regex syntax, which must match all of the content), an EBNF
    grammar (GBNF, whose rule `root` begins; or Lark, whose rule `start` begins), or a JSON list of texts ("choice");
    empty for "json_object"."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "choice"]
    source: str = ""


class ToolGrammar(msgspec.Struct, frozen=True):
    """schema: text of the JSON schema of the arguments; "" = any object. strict: enforced; else any arguments pass."""

    name: str
    schema: str = ""
    strict: bool = False


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """What is enforced on an output. Hashable: the key of what was compiled for it."""

    content: Grammar | None = None
    """The answer's content."""
    tools: tuple[ToolGrammar, ...] = ()
    """Calls that may be made; used with tool_mode "auto" and "required"."""
    tool_mode: Literal["none", "auto", "required"] = "none"
    """none: nothing is enforced on calls. auto: content, or content and one block of calls; a block that begins is one
    of these tools with its arguments. required: a block of calls and nothing else."""
    parallel_calls: bool = True
    """False: at most one call."""
    thinking: bool = False
    """The output begins inside <think>: everything above holds behind </think>, and the output cannot end before it."""
    thinking_budget: int | None = None
    """Tokens of reasoning after which </think> is forced."""
    prefix: str = ""
    """Content that the prompt already holds: the grammar stands behind it."""

    @property
    def is_empty(self) -> bool:
        """Nothing is enforced."""
        return self.content is None and self.tool_mode == "none" and self.thinking_budget is None
