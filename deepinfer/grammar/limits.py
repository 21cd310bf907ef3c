"""Sizes that a structure must keep, tested before anything parses it: parsers recurse, and none may see a text that
could exhaust the stack or the machine (spec/codec.md 8.4)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deepinfer.grammar.errors import GrammarError, blaming
from deepinfer.grammar.structure import Grammar, Structure, ToolGrammar

SCHEMA_BYTES = 256 << 10
SCHEMA_DEPTH = 64  # brackets inside brackets, as the text spells them
REGEX_BYTES = 8 << 10
REGEX_DEPTH = 64
EBNF_BYTES = 64 << 10
EBNF_DEPTH = 64
EBNF_RULES = 2048
CHOICES = 4096
TOOLS = 128
TOOL_NAME_BYTES = 128
TOOLS_BYTES = 1 << 20  # of all schemas together
PREFIX_BYTES = 256 << 10
THINKING_BUDGET = 1 << 24

_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_PATTERN_TEXT = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]?", re.DOTALL)
EBNF_TEXT = re.compile(
    r"""
    "(?:[^"\\\n]|\\.)*+"? | '(?:[^'\\\n]|\\.)*+'? | \[(?:[^\]\\\n]|\\.)*+\]? | (?:\#|//)[^\n]*+ | /(?:[^/\\]|\\.)++/
    """,
    re.VERBOSE | re.DOTALL,
)


def check_limits(structure: Structure) -> None:
    """GrammarError of kind "too_large" for what is beyond a limit, "invalid" for text that is no Unicode or that makes
    no sense beside the rest. Linear in the size of the texts; compiles nothing."""
    with blaming("content"):
        if structure.content is not None:
            _check_grammar(structure.content)
    with blaming("tools"):
        _check_tools(structure.tools)
    if structure.tool_mode == "required" and not structure.tools:
        raise GrammarError("a call is required, but there are no tools")
    if structure.tool_mode == "required" and structure.prefix:
        raise GrammarError("a call is required, but the answer begins with text")
    if structure.thinking_budget is not None and not 0 <= structure.thinking_budget <= THINKING_BUDGET:
        raise GrammarError(f"thinking_budget must be in 0..{THINKING_BUDGET}, got {structure.thinking_budget}")
    _check_size("the prefix", structure.prefix, PREFIX_BYTES)


def _check_grammar(grammar: Grammar) -> None:
    match grammar.kind:
        case "json_schema":
            _check_schema("the JSON schema", grammar.source)
        case "regex":
            _check_size("the regex", grammar.source, REGEX_BYTES)
            _check_depth("the regex", _PATTERN_TEXT.sub("", grammar.source), REGEX_DEPTH, "()")
        case "ebnf":
            _check_size("the EBNF grammar", grammar.source, EBNF_BYTES)
            bare = EBNF_TEXT.sub('""', grammar.source)
            _check_depth("the EBNF grammar", bare, EBNF_DEPTH, "([{)]}")
            if bare.count(":") > EBNF_RULES:
                raise GrammarError(f"the EBNF grammar has more than {EBNF_RULES} rules", "too_large")
        case "choice":
            _check_schema("the list of choices", grammar.source)


def _check_tools(tools: Sequence[ToolGrammar]) -> None:
    if len(tools) > TOOLS:
        raise GrammarError(f"{len(tools)} tools are more than {TOOLS}", "too_large")
    for tool in tools:
        _check_tool(tool)
    if sum(len(tool.schema) for tool in tools) > TOOLS_BYTES:
        raise GrammarError(f"the schemas of all tools together exceed {TOOLS_BYTES} bytes", "too_large")


def _check_tool(tool: ToolGrammar) -> None:
    what = f"the name of tool {tool.name[:TOOL_NAME_BYTES]!r}"
    _check_size(what, tool.name, TOOL_NAME_BYTES)
    if not re.fullmatch(r'[^\s"<>\x00-\x1f]+', tool.name):
        raise GrammarError(f"{what} must be characters without spaces, quotes and angle brackets")
    _check_schema(f"the parameters of tool {tool.name!r}", tool.schema)


def _check_schema(what: str, text: str) -> None:
    _check_size(what, text, SCHEMA_BYTES)
    _check_depth(what, _JSON_TEXT.sub("", text), SCHEMA_DEPTH, "[{]}")


def _check_size(what: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise GrammarError(f"{what} is longer than {limit} bytes", "too_large")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise GrammarError(f"{what} holds a lone surrogate at character {error.start}") from None
    if size > limit:
        raise GrammarError(f"{what} is longer than {limit} bytes", "too_large")


def _check_depth(what: str, text: str, limit: int, brackets: str) -> None:
    """brackets: the opening ones, then the closing ones."""
    opening = brackets[: len(brackets) // 2]
    depth = 0
    for bracket in re.findall(f"[{re.escape(brackets)}]", text):
        depth += 1 if bracket in opening else -1
        if depth > limit:
            raise GrammarError(f"{what} is nested more than {limit} deep", "too_large")
