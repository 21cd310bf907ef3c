"""What a token of an answer costs between the engine and the socket: parsing it, and rendering it for each protocol.
Prints JSON.

    .venv/bin/python benchmarks/codec_parse.py [--tokenizer models/nano] [--tokens 20000] [--repeat 5]

Tokens come one by one, as a stream's do, or in bursts, as drafting gives them. Figures are medians of the process's own
microseconds per token, which do not grow when the machine is shared. Target (issue "serve"): parsing and rendering
together at most 6 us.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from deepinfer.codec.anthropic import MessagesRequest
from deepinfer.codec.anthropic import to_generation as messages_generation
from deepinfer.codec.anthropic import writer as messages_writer
from deepinfer.codec.chat.models import ChatRequest
from deepinfer.codec.chat.request import to_generation as chat_generation
from deepinfer.codec.chat.writer import writer as chat_writer
from deepinfer.codec.conversation import Tool
from deepinfer.codec.generation import AnswerWriter, Usage, WriterContext
from deepinfer.codec.parsing import OutputParser, PlainParser
from deepinfer.codec.responses import ResponsesRequest
from deepinfer.codec.responses import to_generation as responses_generation
from deepinfer.codec.responses import writer as responses_writer
from deepinfer.codec.spellings import DSML, END_THINK
from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.engine.stop import OutputText

ROOT = Path(__file__).resolve().parents[1]
TARGETS = {"parse_and_render_us_per_token": 6.0, "parse_text_us_per_token": 3.0}
WRITE = Tool(
    name="write",
    parameters={"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "array"}}},
)
STOPS = ("\nUser:", "<END>")
BURST = 4


def answers(tokenizer: Tokenizer, tokens: int) -> dict[str, list[int]]:
    """Ids of outputs of at least this many tokens."""
    dsml, end = tokenizer.control_id(DSML), tokenizer.control_id(END_THINK)

    def ids(source: str) -> list[int]:
        found: list[int] = []
        for number, text in enumerate(source.split(DSML)):
            found += [dsml] * (number > 0) + tokenizer.encode_text(text)
        return found

    def filled(text: str) -> list[int]:
        once = tokenizer.encode_text(text)
        return (once * (1 + tokens // len(once)))[:tokens]

    prose = filled("\n".join(page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/*.md"))))
    code = filled("\n".join(file.read_text(encoding="utf-8") for file in sorted(ROOT.glob("deepinfer/codec/*.py"))))
    head = f'\n\n<{DSML} calls>\n<{DSML} invoke name="write">\n<{DSML} parameter name='
    call = f'<{DSML} invoke name="write">\n<{DSML} parameter name="path" string="true">a.py</{DSML} parameter>\n'
    call += f'<{DSML} parameter name="lines" string="false">[1, 2]</{DSML} parameter>\n</{DSML} invoke>\n'
    calls = ids(f"\n\n<{DSML} calls>\n" + call * (1 + tokens // len(ids(call))))
    return {
        "prose": [end, *prose],
        "code": [end, *code],
        "thinking": prose,
        "string_argument": [end, *ids(head + '"path" string="true">'), *code],
        "json_argument": [end, *ids(head + '"lines" string="false">['), *code],
        "many_calls": [end, *calls],
    }


def cost(repeat: int, tokens: int, action: Callable[[], Any]) -> float:
    """Median of the process's own microseconds per token."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return round(1e6 * statistics.median(times) / tokens, 2)


def pieces(ids: list[int], size: int) -> list[list[int]]:
    return [ids[at : at + size] for at in range(0, len(ids), size)]


def parser(tokenizer: Tokenizer, stops: tuple[str, ...] = (), tools: Iterable[Tool] = (WRITE,)) -> OutputParser:
    stop = OutputText(stops) if stops else None
    return OutputParser(tokenizer, starts="thinking", tools=list(tools), make_id=lambda: "call_0", stop=stop)


def parse(parsing: OutputParser | PlainParser, bursts: list[list[int]]) -> None:
    for burst in bursts:
        parsing.push(burst)
    parsing.finish("length")


def parse_and_render(parsing: OutputParser, rendering: AnswerWriter, bursts: list[list[int]]) -> None:
    rendering.start(Usage(1, 0))
    for burst in bursts:
        if events := parsing.push(burst):
            rendering.events(0, events, {})
    rendering.events(0, parsing.finish("length"), {})
    assert parsing.result is not None
    rendering.finish(0, parsing.result)
    rendering.end(Usage(1, 0))


def writers(tokenizer: Tokenizer) -> dict[str, Callable[[], AnswerWriter]]:
    """A fresh stream of each protocol."""
    context = WriterContext(id="x", created=0, model="m", token_bytes=tokenizer.token_bytes)
    said = [{"role": "user", "content": "x"}]
    chat = ChatRequest.model_validate({"model": "m", "messages": said, "stream": True})
    responses = ResponsesRequest.model_validate({"model": "m", "input": "x", "stream": True})
    messages = MessagesRequest.model_validate({"model": "m", "messages": said, "max_tokens": 1, "stream": True})
    return {
        "chat": lambda: chat_writer(chat, chat_generation(chat), context),
        "responses": lambda: responses_writer(responses, responses_generation(responses), context),
        "messages": lambda: messages_writer(messages, messages_generation(messages), context),
    }


def tenths(tokenizer: Tokenizer, ids: list[int], repeat: int) -> dict[str, float]:
    """Microseconds per token of the first and of the last tenth of a long output."""
    size = len(ids) // 10
    times: dict[str, list[float]] = {"first": [], "between": [], "last": []}
    for _ in range(repeat):
        parsing = parser(tokenizer)
        for name, part in zip(times, (ids[:size], ids[size:-size], ids[-size:]), strict=True):
            start = time.process_time()
            for token in part:
                parsing.push([token])
            times[name].append(1e6 * (time.process_time() - start) / len(part))
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def costs(tokenizer: Tokenizer, ids: list[int], repeat: int) -> dict[str, float]:
    """Microseconds per token of one answer, by what is done with it."""
    single, bursts = pieces(ids, 1), pieces(ids, BURST)
    made = writers(tokenizer)

    def rendered(protocol: str) -> None:
        parse_and_render(parser(tokenizer), made[protocol](), single)

    actions: dict[str, Callable[[], None]] = {
        "parse": lambda: parse(parser(tokenizer), single),
        "parse_no_tools": lambda: parse(parser(tokenizer, tools=()), single),
        "parse_2_stops": lambda: parse(parser(tokenizer, STOPS), single),
        "parse_plain": lambda: parse(PlainParser(tokenizer), single),
        f"parse_bursts_of_{BURST}": lambda: parse(parser(tokenizer), bursts),
        **{f"parse_and_render_{protocol}": partial(rendered, protocol) for protocol in made},
    }
    return {name: cost(repeat, len(ids), action) for name, action in actions.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--tokenizer", type=Path, default=ROOT / "models" / "nano", help="folder with tokenizer.json"
    )
    arguments.add_argument("--tokens", type=int, default=20_000, help="of each answer")
    arguments.add_argument("--repeat", type=int, default=5)
    arguments.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = arguments.parse_args()
    load = os.getloadavg()[0]
    tokenizer = Tokenizer.from_directory(options.tokenizer)
    all_answers = answers(tokenizer, options.tokens)
    result: dict[str, Any] = {
        "tokenizer": options.tokenizer.name,
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "targets": TARGETS,
        "us_per_token": {name: costs(tokenizer, ids, options.repeat) for name, ids in all_answers.items()},
    }
    result["tenths_of_a_long_answer"] = tenths(tokenizer, answers(tokenizer, 10 * options.tokens)["code"], 3)
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
