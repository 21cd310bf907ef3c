"""Read one JSON object of config.json: every key is used or named, and problems are collected instead of raised."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any


class ConfigError(ValueError):
    """A config.json that this engine cannot obey. `problems` holds one sentence per violation."""

    def __init__(self, source: str, problems: Iterable[str]):
        self.source = source
        self.problems = list(problems)
        plural = "problem" if len(self.problems) == 1 else "problems"
        super().__init__(f"{source}: {len(self.problems)} {plural}:\n" + "\n".join(f"  - {p}" for p in self.problems))


class Section:
    """One JSON object being read: remembers which keys were used and collects problems instead of raising."""

    def __init__(self, values: Mapping[str, Any], prefix: str, problems: list[str]):
        self.values, self.prefix, self.problems = values, prefix, problems
        self.seen: set[str] = set()
        self.parsed = True  # False once a value that the config needs is missing or mistyped
        self.parents: list[Section] = []

    def fail(self, message: str) -> None:
        self.problems.append(message)
        for section in (self, *self.parents):
            section.parsed = False

    def section(self, name: str) -> Section | None:
        """The nested object `name`; None (and a problem) if it is missing or no object."""
        self.seen.add(name)
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            what = "is missing" if name not in self.values else f"must be an object, got {value!r}"
            self.fail(f"{self.prefix}{name} {what}")
            return None
        child = Section(value, f"{self.prefix}{name}.", self.problems)
        child.parents = [self, *self.parents]
        return child

    def fixed(self, table: Mapping[str, Any]) -> None:
        """Check the fields that have one supported value."""
        for name, supported in table.items():
            self.seen.add(name)
            value = self.values.get(name, supported)
            if value != supported or isinstance(value, bool) != isinstance(supported, bool):
                self.problems.append(f"{self.prefix}{name} = {value!r} is not supported; only {supported!r} is")

    def harmless(self, table: Mapping[str, tuple[type, ...]]) -> None:
        """Check only the type of fields that change nothing at inference."""
        for name, types in table.items():
            self.seen.add(name)
            if name in self.values and not isinstance(self.values[name], types):
                self.problems.append(f"{self.prefix}{name} = {self.values[name]!r} has the wrong type")

    def take(self, name: str, annotation: str, default: Any = dataclasses.MISSING) -> Any:
        """The value of `name` as the dataclass annotation says; None (and a problem) if it is missing or mistyped."""
        self.seen.add(name)
        if name not in self.values:
            if default is dataclasses.MISSING:
                self.fail(f"{self.prefix}{name} is missing")
                return None
            return default
        value = self.values[name]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if annotation == "int" and number and int(value) == value:
            return int(value)
        if annotation in ("float", "float | None") and number:
            return float(value)
        if annotation == "float | None" and value is None:
            return None
        if annotation == "bool" and isinstance(value, bool):
            return value
        if (
            annotation == "tuple[int, ...]"
            and isinstance(value, list)
            and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        ):
            return tuple(value)
        expected = {"tuple[int, ...]": "a list of integers", "int": "an integer"}.get(annotation, annotation)
        self.fail(f"{self.prefix}{name} = {value!r} must be {expected}")
        return None

    def take_all(self, fields: Iterable[dataclasses.Field[Any]]) -> dict[str, Any]:
        return {f.name: self.take(f.name, str(f.type), f.default) for f in fields}

    def build(self, cls: type) -> Any:
        """An instance of a small dataclass from this whole section; None if a value did not parse."""
        values = self.take_all(dataclasses.fields(cls))
        self.finish()
        return cls(**values) if self.parsed else None

    def finish(self) -> None:
        """Name every key that nobody asked for."""
        for name in self.values:
            if name not in self.seen:
                self.problems.append(
                    f"{self.prefix}{name} = {self.values[name]!r} is an unknown field; this engine cannot tell what "
                    "it would "
                    "change. Remove it if it is harmless"
                )
