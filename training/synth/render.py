"""Chats in the V4.1 prompt grammar, complete with answers.

The fixed English of the tool block and of the effort and format lines is not repeated here: `python -m
training.synth.render --out FILE` reads it once from the deepseek-recipe package, and `Phrases` loads that file.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.tokenizer import ASSISTANT, BOS, DSML, EOS, SYSTEM, THINK, THINK_END, USER


@dataclass(frozen=True)
class Phrases:
    """Text before and after the variable part of each block."""

    effort: tuple[str, str]
    tools: tuple[str, str]
    schema: tuple[str, str]

    @classmethod
    def load(cls, path: str | Path) -> Phrases:
        return cls(**{key: tuple(value) for key, value in json.loads(Path(path).read_text()).items()})


class Chat:
    """Collects turns; `text()` is the training text, `prompt()` the text up to the next answer."""

    def __init__(
        self,
        phrases: Phrases,
        thinking: bool = False,
        effort: int = 75,
        system: str = "",
        tools: list[dict[str, Any]] | None = None,
        schema: dict[str, Any] | None = None,
    ):
        self.phrases, self.thinking, self.effort, self.system = phrases, thinking, effort, system
        self.tools, self.schema = tools, schema
        self.turns: list[tuple[str, str, str]] = []  # role, reasoning, content

    def user(self, text: str) -> Chat:
        self.turns.append(("user", "", text))
        return self

    def results(self, texts: list[str]) -> Chat:
        """Tool results, in the order of the calls."""
        return self.user("\n\n".join(f"<tool_result>{text}</tool_result>" for text in texts))

    def assistant(
        self, content: str, reasoning: str = "", calls: list[tuple[str, dict[str, Any]]] | None = None
    ) -> Chat:
        self.turns.append(("assistant", reasoning, content + (f"\n\n{render_calls(calls)}" if calls else "")))
        return self

    def head(self) -> str:
        lead = self.phrases.effort[0] + str(self.effort) + self.phrases.effort[1] if self.thinking else ""
        lead += self.system
        if self.tools:
            lead += self.phrases.tools[0] + "\n".join(map(render_json, self.tools)) + self.phrases.tools[1]
        if self.schema is not None:
            lead += self.phrases.schema[0] + render_json(self.schema) + self.phrases.schema[1]
        return BOS + (SYSTEM + lead if lead else "")

    def text(self) -> str:
        """All turns, each answer closed by EOS."""
        last_user = max(i for i, turn in enumerate(self.turns) if turn[0] == "user")
        out = self.head()
        for i, (role, reasoning, content) in enumerate(self.turns):
            if role == "user":
                out += USER + content
                continue
            keeps = self.thinking and (self.tools or i > last_user)
            out += ASSISTANT + (f"{THINK}{reasoning}" if keeps else "") + THINK_END + content + EOS
        return out

    def prompt(self) -> str:
        """Turns so far plus the cue of the next answer."""
        return self.text() + ASSISTANT + (THINK if self.thinking else THINK_END)


def render_json(value: Any) -> str:
    """JSON with the separators of the prompt grammar."""
    return json.dumps(value, ensure_ascii=False)


def render_calls(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """A DSML block; strings stand as they are, other values as JSON."""
    out = [f"<{DSML} calls>"]
    for name, arguments in calls:
        out.append(f'<{DSML} invoke name="{name}">')
        for key, value in arguments.items():
            plain = isinstance(value, str)
            shown = value if plain else render_json(value)
            out.append(f'<{DSML} parameter name="{key}" string="{str(plain).lower()}">{shown}</{DSML} parameter>')
        if not arguments:
            out.append("")
        out.append(f"</{DSML} invoke>")
    return "\n".join([*out, f"</{DSML} calls>"])


def extract_phrases() -> dict[str, tuple[str, str]]:
    """Reads the fixed wording from deepseek-recipe by rendering marked conversations."""
    from deepseek_recipe import Conversation, DeepseekV41Encoding, SystemMessage, ToolDefinition, UserMessage

    def lead(**options: Any) -> str:
        conversation = Conversation([SystemMessage("@"), UserMessage("?")], **options)
        prompt = DeepseekV41Encoding().render_conversation(conversation).prompt
        return prompt.split(SYSTEM)[1].split(USER)[0]

    effort = lead(thinking_mode=True, reasoning_effort="high").split("@")[0]
    tool = ToolDefinition("marker", "", {})
    tools = lead(thinking_mode=False, tools=[tool]).split("@", 1)[1]
    line = render_json({"name": "marker", "description": "", "parameters": {}})
    schema = lead(thinking_mode=False, response_schema={"marker": 1}).split("@", 1)[1]
    return {
        "effort": tuple(effort.split("75", 1)),
        "tools": tuple(tools.split(line, 1)),
        "schema": tuple(schema.split(render_json({"marker": 1}), 1)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args().out.write_text(json.dumps(extract_phrases(), ensure_ascii=False))
