"""What a request costs before the engine sees it: rendering and encoding its prompt. Prints JSON.

    .venv/bin/python benchmarks/codec.py [--tokenizer models/nano] [--tokens 1000000] [--repeat 5]

Figures are medians: wall time, which the targets are about, and the process's own time over all threads, which does not
grow when the machine is shared. Targets (issue "serve"): encode at most 2 us per prompt token, a prompt of 1M tokens in
at most 2 s on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepinfer.codec.conversation import Conversation, Tool, ToolCall, Turn
from deepinfer.codec.encoder import encode
from deepinfer.codec.template import render
from deepinfer.codec.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"encode_us_per_token": 2.0, "encode_1M_tokens_s": 2.0}
SIZES = (200, 4_000, 64_000)  # tokens of the prompts that are encoded beside the long one


def measured(repeat: int, action: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds of wall time and own time."""
    wall, own = [], []
    for _ in range(repeat):
        start, start_own = time.perf_counter(), time.process_time()
        action()
        own.append(time.process_time() - start_own)
        wall.append(time.perf_counter() - start)
    return statistics.median(wall), statistics.median(own)


def source_text() -> str:
    """This repository's pages and code, each file once."""
    files = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("deepinfer/**/*.py"), *ROOT.glob("tests/**/*.py")])
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def agent(rounds: int) -> Conversation:
    """An agent's history: each round is a call and its result; three tools."""
    schema = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "array"}}}
    tools = tuple(
        Tool(name=name, description="Works on a file.", parameters=schema) for name in ("read", "edit", "run")
    )
    turns = [Turn(role="system", text="You are a careful programmer."), Turn(role="user", text="Mend the tests.")]
    for number in range(rounds):
        call = ToolCall(f"c{number}", "read", json.dumps({"path": f"tests/test_{number}.py", "lines": [1, number]}))
        turns.append(Turn(role="assistant", text="Next.", reasoning="What does it say?", tool_calls=(call,)))
        turns.append(Turn(role="tool", text="def test(): ...", tool_call_id=call.id))
    return Conversation(turns=tuple(turns), tools=tools)


def renders(repeat: int) -> dict[str, Any]:
    """Microseconds of a render."""
    chat = Conversation(turns=(Turn(role="system", text="Be brief."), Turn(role="user", text="Hello")))
    result = {}
    for name, conversation in {"chat": chat, "agent_200_calls": agent(200)}.items():
        wall, own = measured(10 * repeat, lambda conversation=conversation: render(conversation))  # type: ignore[misc]
        result[name] = {"wall_us": round(1e6 * wall, 1), "own_us": round(1e6 * own, 1)}
    return result


def encodes(tokenizer: Tokenizer, tokens: int, repeat: int) -> dict[str, Any]:
    """By text: tokens, and microseconds per token."""
    text = source_text()
    per_token = len(text) / len(tokenizer.encode_text(text))
    long = text * (1 + int(tokens * per_token) // len(text))
    texts = {f"source_{size}": long[: int(size * per_token)] for size in (*SIZES, tokens)}
    texts[f"json_{SIZES[-1]}"] = json.dumps([{"id": n, "name": f"n{n * n}"} for n in range(SIZES[-1] // 12)])
    texts["one_word_of_64000_letters"] = "etaoin" * 10_667  # cannot be cut
    result = {}
    for name, content in texts.items():
        rendered = render(Conversation(turns=(Turn(role="user", text=content),)))
        count = len(encode(rendered, tokenizer))
        wall, own = measured(repeat, lambda rendered=rendered: encode(rendered, tokenizer))  # type: ignore[misc]
        result[name] = {
            "tokens": count,
            "wall_s": round(wall, 4),
            "wall_us_per_token": round(1e6 * wall / count, 3),
            "own_us_per_token": round(1e6 * own / count, 3),
        }
    refused = replace(agent(0), turns=(Turn(role="user", text=long),))
    wall, own = measured(repeat, lambda: _refused(render(refused), tokenizer))
    result["refused_at_4096"] = {"wall_s": round(wall, 4), "own_s": round(own, 4)}
    return result


def _refused(rendered: Any, tokenizer: Tokenizer) -> None:
    try:
        encode(rendered, tokenizer, max_tokens=4096)
    except ValueError:
        return
    raise AssertionError("a prompt of many more tokens was encoded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "models" / "nano", help="folder with tokenizer.json")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the long prompt")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    tokenizer = Tokenizer.from_directory(options.tokenizer)
    start = time.perf_counter()
    tokenizer.warm_up()
    warm_up = time.perf_counter() - start
    result = {
        "tokenizer": options.tokenizer.name,
        "vocabulary": tokenizer.vocab_size,
        "can_be_cut": tokenizer.can_be_cut,
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "targets": TARGETS,
        "warm_up_s": round(warm_up, 2),
        "render": renders(options.repeat),
        "encode": encodes(tokenizer, options.tokens, options.repeat),
    }
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
