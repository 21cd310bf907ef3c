"""The chart of a sweep: throughput of a GPU against the speed of one user (decode) or the time of a step (prefill).

    python examples/sweep/plot_pareto.py sweep/decode.jsonl --output decode.svg

A line per tag. Points that another one beats in both respects are dots beside it. Decode has two lines per tag: every
draft accepted (as measured), and scaled to the acceptance that the points name, by one formula (--scaling). Points of
one file that were not measured alike are refused.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

# What every point of a chart has in common; of one tag also what the parallel size changes.
ALIKE = ("mode", "model", "context_length", "non_cached_tokens", "nextn", "yoco_clip", "prompt_mode", "acceptance")
ALIKE_OF_A_TAG = ("ep_size", "cp", "redundant_experts")
VARIES = {"decode": "decode_num_requests", "prefill": "prefill_batch_size"}
SCALINGS = ("geometric", "linear", "flat")
X_NAMES = {"decode": "output tokens/s of one user", "prefill": "milliseconds of a step"}
Y_NAMES = {"decode": "output tokens/s of a GPU", "prefill": "input tokens/s of a GPU, not cached"}
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
WIDTH, HEIGHT = 820, 520
LEFT, RIGHT, TOP, BOTTOM = 80, 790, 40, 460  # of the axes


class Point(NamedTuple):
    size: int  # requests, or tokens of a step
    x: float  # tokens/s of one user: more is better; or milliseconds of a step: less is better
    y: float  # tokens/s of a GPU


def missing(text: str) -> str | None:
    """What keeps a line from being a point, in words."""
    try:
        line = json.loads(text)
    except ValueError:
        return "it is not JSON"
    if not isinstance(line, dict):
        return "it is not a JSON object"
    mode = line.get("mode")
    if not isinstance(mode, str) or mode not in VARIES:
        return f"mode must be one of {', '.join(VARIES)}"
    fields = ["tok_s_gpu", "step_ms", VARIES[mode], *(["tok_s_user"] if mode == "decode" else [])]
    for field in ("tag", *fields):
        if field not in line:
            return f"{field} is missing"
    for field in fields:
        value = line[field]
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            return f"{field} must be a number above 0"
    return None if isinstance(line["tag"], str) else "tag must be a string"


def read(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Lines of all files. ValueError naming the line that is none."""
    lines = []
    for file in files:
        try:
            content = file.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{file}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{file}: is not UTF-8 text") from None
        for number, text in enumerate(content.splitlines(), 1):
            if not text.strip():
                continue
            if wrong := missing(text):
                raise ValueError(f"{file}:{number}: no point of a sweep: {wrong}")
            lines.append(json.loads(text))
    if not lines:
        raise ValueError("there are no points")
    return lines


def check(lines: Sequence[dict[str, Any]]) -> None:
    """ValueError unless the points can stand in one chart: measured alike, none twice, none quick."""

    def differing(group: Sequence[dict[str, Any]], fields: Sequence[str]) -> list[str]:
        found = []
        for field in fields:
            values = sorted({json.dumps(line.get(field)) for line in group})
            if len(values) > 1:
                found.append(f"{field}: {', '.join(values)}")
        return found

    if wrong := differing(lines, ALIKE):
        raise ValueError(f"the points were not measured alike: {'; '.join(wrong)}")
    for tag, group in by_tag(lines).items():
        if wrong := differing(group, ALIKE_OF_A_TAG):
            raise ValueError(f"the points of {tag} were not measured alike: {'; '.join(wrong)}")
        sizes = [line[VARIES[line["mode"]]] for line in group]
        twice = sorted({size for size in sizes if sizes.count(size) > 1})
        if twice:
            raise ValueError(f"{tag} has more than one point at {VARIES[group[0]['mode']]} {twice}: keep one of each")
    if any(line.get("quick") for line in lines):
        raise ValueError("there are points of --quick runs, which have too few steps to be shown")


def by_tag(lines: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["tag"], []).append(line)
    return found


def points(group: Sequence[dict[str, Any]], scaling: str | None = None) -> list[Point]:
    """Of one tag, by size. scaling: of a decode rate to its acceptance; None = every draft accepted."""
    found = []
    for line in group:
        size = line[VARIES[line["mode"]]]
        if line["mode"] == "prefill":
            found.append(Point(size, line["step_ms"], line["tok_s_gpu"]))
        else:
            rate = line["tok_s_gpu"] if scaling is None else line["scaled_tok_s_gpu"][scaling]
            found.append(Point(size, line["tok_s_user"] * rate / line["tok_s_gpu"], rate))
    return sorted(found)


def pareto(found: Sequence[Point], mode: str) -> list[Point]:
    """Points that none other beats in both respects, by x."""
    sign = 1 if mode == "decode" else -1  # of x: a user's speed is to be high, a step's time low
    best, front = float("-inf"), []
    for point in sorted(found, key=lambda p: (sign * p.x, p.y), reverse=True):
        if point.y > best:
            best = point.y
            front.append(point)
    return sorted(front, key=lambda p: p.x)


class Series(NamedTuple):
    name: str
    color: str
    dashed: bool
    front: list[Point]
    beaten: list[Point]


def series(lines: Sequence[dict[str, Any]], scaling: str) -> list[Series]:
    """The lines of a chart, tag by tag."""
    first, found = lines[0], []
    for number, (tag, group) in enumerate(by_tag(lines).items()):
        kinds: list[tuple[str | None, str]] = [(None, tag)]
        if first["mode"] == "decode" and first["nextn"]:
            kinds = [
                (None, f"{tag}, every draft accepted"),
                (scaling, f"{tag}, at {first['acceptance']:.0%} ({scaling})"),
            ]
        for kind, name in kinds:
            all_points = points(group, kind)
            front = pareto(all_points, first["mode"])
            beaten = [point for point in all_points if point not in front]
            found.append(Series(name, COLORS[number % len(COLORS)], kind is not None, front, beaten))
    return found


def ticks(most: float, about: int = 6) -> list[float]:
    """0 and its round multiples up to `most`."""
    rough = most / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * number for number in range(int(most / step + 1e-9) + 1)]


def draw(lines: Sequence[dict[str, Any]], scaling: str) -> str:
    """The chart as SVG."""
    first = lines[0]
    mode, drawn = first["mode"], series(lines, scaling)
    shown = [point for line in drawn for point in (*line.front, *line.beaten)]
    x_most, y_most = 1.08 * max(point.x for point in shown), 1.08 * max(point.y for point in shown)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * x / x_most, BOTTOM - (BOTTOM - TOP) * y / y_most

    def text(x: float, y: float, content: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(content)}</text>'

    title = (
        f"{first['model']}, {mode}: {first['context_length']:,} tokens of context, {first['nextn']} drafts; "
        f"numbers: {VARIES[mode].replace('_', ' ')}"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"',
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 22, title, 'font-size="13"'),
        text((LEFT + RIGHT) / 2, HEIGHT - 14, X_NAMES[mode], 'text-anchor="middle"'),
        text(0, 0, Y_NAMES[mode], f'text-anchor="middle" transform="translate(18 {(TOP + BOTTOM) / 2}) rotate(-90)"'),
    ]
    for value in ticks(x_most):
        x, y = place(value, 0)
        out.append(f'<path d="M{x:.1f} {y:.1f}V{TOP}" stroke="#ddd"/>')
        out.append(text(x, y + 18, f"{value:,g}", 'text-anchor="middle"'))
    for value in ticks(y_most):
        x, y = place(0, value)
        out.append(f'<path d="M{x:.1f} {y:.1f}H{RIGHT}" stroke="#ddd"/>')
        out.append(text(x - 8, y + 4, f"{value:,g}", 'text-anchor="end"'))
    for number, line in enumerate(drawn):
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        style = f'stroke="{line.color}" stroke-width="2" fill="none"{dash}'
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(point.x, point.y) for point in line.front))
        out.append(f'<polyline points="{way}" {style}/>')
        for point in (*line.front, *line.beaten):
            x, y = place(point.x, point.y)
            radius = 4 if point in line.front else 2.5
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{line.color}"/>')
            out.append(text(x + 6, y - 6, f"{point.size:,}", 'font-size="10" fill="#555"'))
        height = TOP + 14 + 18 * number
        out.append(f'<path d="M{RIGHT - 250} {height}h28" {style}/>')
        out.append(text(RIGHT - 216, height + 4, line.name))
    return "\n".join([*out, "</svg>\n"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="of --result_jsonl, all of one mode")
    parser.add_argument("--output", type=Path, help="an SVG; default: beside the first file")
    parser.add_argument("--scaling", choices=SCALINGS, default=SCALINGS[0])
    options = parser.parse_args(argv)
    lines = read(options.files)
    check(lines)
    output = options.output or options.files[0].with_suffix(".svg")
    chart = draw(lines, options.scaling)
    try:
        output.write_text(chart, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{output}: cannot be written: {error.strerror}") from None
    print(f"{output}: {len(lines)} points of {len(by_tag(lines))} tags")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"plot_pareto: {error}")
