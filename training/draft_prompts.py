"""Prompts that drafting is measured and calibrated with: beginnings that the model goes on from, of every kind of text
that it was trained on.

python -m training.draft_prompts --valid corpus/valid.jsonl.xz --phrases phrases.json

writes benchmarks/prompts/drafting.jsonl, from held-out documents whose licence lets excerpts stand in a repository:
code under BSD and MIT (benchmarks/prompts/NOTICE.md), prose in the public domain; documentation of this repository; and
tool requests in wordings kept from training. With --calibration FILE it writes another set to that file instead, from
the other held-out documents, other parts of the prose, and other requests.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from training.corpus import documents
from training.synth.render import Phrases
from training.synth.tools import tool_chat
from training.tokenizer import BOS

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks" / "prompts" / "drafting.jsonl"
KINDS = ("code", "tools", "prose", "doc")
LENGTH = (400, 650)  # characters of an excerpt: 110 to 200 tokens
# Held-out prose whose text is in the public domain, by what its name holds: (title, excerpts).
PUBLIC_DOMAIN = {
    "henry_iv_part_2": ("William Shakespeare, Henry IV, Part 2", 5),
    "henry_vi_part_3": ("William Shakespeare, Henry VI, Part 3", 5),
    "moby-dick": ("Herman Melville, Moby-Dick", 5),
    "janeausten": ("Jane Austen, Sense and Sensibility", 4),
    "engWEB": ("World English Bible", 2),
    "comments/zcom/mhcc": ("Matthew Henry, Concise Commentary", 3),
}
# Held-out code of which benchmarks/prompts has excerpts: projects under BSD and MIT.
OPEN_CODE = ("sympy", "mpmath", "networkx", "numpy", "torch", "pygments", "pytest", "rich")
OWN_TEXT = ("docs", "CONTRIBUTING.md", "README.md")


class Prompt(NamedTuple):
    kind: str
    source: str
    text: str  # begins with the spelling of the begin token


def excerpt(rng: random.Random, text: str) -> str:
    """Whole lines of a document, from a paragraph's start if there is one in reach, about as long as LENGTH. Without
    the last line break: to the model a bare one is something else than one with the indentation behind it."""
    length = rng.randint(*LENGTH)
    start = rng.randrange(max(1, len(text) - length))
    for border in ("\n\n", "\n", " "):
        found = text.find(border, start, start + length)
        if start and found >= 0:
            start = found + len(border)
            break
    part = text[start : start + length]
    border = "\n" if "\n" in part[length // 2 :] else " "
    return part[: part.rindex(border)].strip("\n").rstrip()


def own_text(rng: random.Random, count: int) -> Iterator[Prompt]:
    """Excerpts of this repository's pages."""
    files = [
        f
        for place in OWN_TEXT
        for f in ([ROOT / place] if place.endswith(".md") else sorted((ROOT / place).glob("*.md")))
    ]
    files = [f for f in files if f.stat().st_size > 3 * LENGTH[1]]
    for file in rng.sample(files * (1 + count // len(files)), count):
        name = file.relative_to(ROOT).as_posix()
        yield Prompt("doc", f"deepinfer, {name}", BOS + excerpt(rng, file.read_text(encoding="utf-8")))


def public_domain(rng: random.Random, valid: Path, latter: bool) -> Iterator[Prompt]:
    """Excerpts of the second halves of the works, or of the first ones."""
    works: dict[str, str] = {}
    for record in documents(valid):
        for part in PUBLIC_DOMAIN:
            if part in record["name"] + record["src"]:
                works[part] = works.get(part, "") + record["text"] + "\n\n"
    for part, (title, count) in PUBLIC_DOMAIN.items():
        text, middle = works[part], len(works[part]) // 2
        half = text[middle:] if latter else text[:middle]
        for _ in range(count):
            yield Prompt("prose", f"{title} (public domain)", BOS + excerpt(rng, half))


def held_out(rng: random.Random, valid: Path, kind: str, count: int, only: tuple[str, ...] = ()) -> Iterator[Prompt]:
    """Excerpts of held-out documents of a kind: of projects in `only`, else of those that the benchmark leaves alone.
    Several of a document only where there are too few of them."""
    kept = (*PUBLIC_DOMAIN, *OPEN_CODE)
    found = []
    for record in documents(valid):
        path = f"{record['src']}/{record['name']}".split("dist-packages/")[-1]
        if "_vendor/" in path:
            path = path.split("_vendor/")[1]
        project = path.split("/")[0].lstrip("_")
        listed = project in only if only else not any(part in f"{record['src']}/{record['name']}" for part in kept)
        if record["kind"] == kind and len(record["text"]) > LENGTH[1] and listed:
            found.append((path, record["text"]))
    rng.shuffle(found)
    for path, text in (found * (1 + count // len(found)))[:count]:
        yield Prompt(kind, path, BOS + excerpt(rng, text))


def tools(rng: random.Random, phrases: Phrases, count: int) -> Iterator[Prompt]:
    """Requests whose answer is a call of a tool, up to the cue of the answer."""
    for _ in range(count):
        chat = tool_chat(rng, phrases, "valid", calls_only=True)
        chat.turns.pop()
        yield Prompt("tools", "training/synth, wordings kept from training", chat.prompt())


def benchmark(valid: Path, phrases: Phrases, count: int = 24) -> list[Prompt]:
    """Those of benchmarks/prompts, kind after kind."""
    rng = random.Random(4)
    prose = list(public_domain(rng, valid, latter=True))
    rng.shuffle(prose)
    return [
        *held_out(rng, valid, "code", count, OPEN_CODE),
        *tools(rng, phrases, count),
        *prose[:count],
        *own_text(rng, count),
    ]


def calibration(valid: Path, phrases: Phrases, count: int = 48) -> list[Prompt]:
    """Other ones of the same kinds."""
    rng = random.Random(104)
    prose = list(public_domain(rng, valid, latter=False))
    return [
        *held_out(rng, valid, "code", count),
        *tools(rng, phrases, count),
        *prose,
        *held_out(rng, valid, "prose", max(0, count - len(prose))),
        *held_out(rng, valid, "doc", count),
    ]


def read(file: Path = FILE) -> list[Prompt]:
    return [Prompt(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def write(prompts: list[Prompt], file: Path = FILE) -> None:
    lines = [json.dumps(prompt._asdict(), ensure_ascii=False) for prompt in prompts]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--phrases", type=Path, required=True)
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="write prompts to calibrate with, to this file"
    )
    args = parser.parse_args()
    phrases = Phrases.load(args.phrases)
    if args.calibration:
        write(calibration(args.valid, phrases), args.calibration)
    else:
        write(benchmark(args.valid, phrases))


if __name__ == "__main__":
    main()
