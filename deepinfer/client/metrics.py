"""What a server's /metrics says, and what changed between two looks at it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepinfer.client.chat import refusal
from deepinfer.client.http import Connection

PREFIX = "dsv_"
_LINE = re.compile(rf"{PREFIX}(\w+)(?:\{{(.*)\}})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Exposition:
    """Names without the prefix."""

    sums: dict[str, float]
    """Value of each sample name, summed over its labels."""
    build: dict[str, str]
    """Labels of build_info: what runs there."""

    @classmethod
    def parse(cls, text: str) -> Exposition:
        sums: dict[str, float] = {}
        build: dict[str, str] = {}
        for line in text.splitlines():
            match = _LINE.fullmatch(line)
            if match is None:
                continue
            name, labels, value = match.groups()
            if name == "build_info":
                build = dict(_LABEL.findall(labels or ""))
            sums[name] = sums.get(name, 0.0) + float(value)
        return cls(sums, build)

    def growth(self, earlier: Exposition, name: str) -> float:
        """How much a counter grew; counts from 0 if the engine was started anew meanwhile."""
        now, before = self.sums.get(name, 0.0), earlier.sums.get(name, 0.0)
        return now - before if now >= before else now


async def scrape(connection: Connection) -> Exposition:
    """ServerRefusal, ServerUnreachable."""
    async with connection.request("GET", "/metrics") as answer:
        if answer.status != 200:
            raise await refusal(answer)
        return Exposition.parse((await answer.body()).decode("utf-8", "replace"))
