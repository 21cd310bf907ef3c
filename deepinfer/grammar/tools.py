"""Blocks of tool calls (spec/codec.md 3) in the matcher's language.

The matcher's lexer takes the longest literal that fits and does not go back ("\\n</" would hide "\\n" before "<"), so
the rules are cut where texts part: every "<" ends a literal, and what follows it decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.grammar.parameters import any_parameters, declared_parameters
from deepinfer.grammar.sources import HEADER, literal
from deepinfer.grammar.structure import ToolGrammar


def block_lark(tools: Sequence[ToolGrammar], dsml: int, parallel: bool) -> str:
    """From the two line breaks before the block to its end, which only the end token may follow. dsml: the id."""
    mark = f"<[{dsml}]>"
    calls = "call+" if parallel else "call"
    rules = [
        f'start: "\\n\\n<" {mark} " calls>\\n<" {calls} "/" {mark} " calls>"',
        f'call: {mark} ({" | ".join(f"call_{number}" for number in range(len(tools)))}) {mark} " invoke>\\n<"',
    ]
    for number, tool in enumerate(tools):
        parameters = "any_parameters"
        if tool.strict:
            parameters, more = declared_parameters(tool, mark, f"p{number}")
            rules += more
        opener = literal(f' invoke name="{tool.name}">\n')
        rules.append(f"call_{number}: {opener} {parameters}")
    return HEADER + "\n".join([*rules, *any_parameters(mark)]) + "\n"
