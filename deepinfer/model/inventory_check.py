"""Find every tensor of a checkpoint directory and compare the whole inventory with what the config implies.

Only headers are read. Everything that is wrong is reported in one CheckpointError, so that a damaged download is
repaired once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from deepinfer.model.safetensors_header import CheckpointError, StoredTensor, read_header
from deepinfer.model.tensors import TensorSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHOWN = 20  # names listed per kind of problem; the count is always complete


def locate(directory: Path, specs: Mapping[str, TensorSpec], groups: Collection[str]) -> dict[str, StoredTensor]:
    """Where each tensor of `specs` stands, after checking the whole inventory.

    groups: the parts that must be complete; tensors of other groups may be absent, also with their whole shard.
    Raises CheckpointError listing all missing, unexpected, mis-shaped and mis-typed tensors and all damaged files.
    """
    problems: list[str] = []
    if (directory / INDEX_NAME).exists():
        found = _from_index(directory, specs, groups, problems)
    elif (directory / SINGLE_NAME).exists():
        found = _from_files(directory, [SINGLE_NAME], problems)
    else:
        raise CheckpointError(
            f"{directory} holds neither {INDEX_NAME} nor {SINGLE_NAME}; "
            "give a directory with safetensors weights, or write one with `deepinfer make-checkpoint`"
        )
    damaged = bool(problems)
    missing = [s for s in specs.values() if s.name not in found and s.group in groups]
    unexpected = [name for name in found if name not in specs]
    if not damaged:  # a broken shard already explains its missing tensors
        _report(problems, "missing tensors", (f"{s.name} {s.dtype} {list(s.shape)}" for s in missing))
    elif missing:
        problems.append(f"{len(missing)} tensors could not be found because of the files above")
    _report(problems, "unexpected tensors", (f"{name} (in {found[name].file.name})" for name in unexpected))
    pairs = [(specs[name], tensor) for name, tensor in found.items() if name in specs]
    _report(
        problems,
        "tensors of the wrong shape",
        (
            f"{s.name} is {list(t.shape)}, needs {list(s.shape)} (in {t.file.name})"
            for s, t in pairs
            if s.shape != t.shape
        ),
    )
    _report(
        problems,
        "tensors of the wrong dtype",
        (f"{s.name} is {t.dtype}, needs {s.dtype} (in {t.file.name})" for s, t in pairs if s.dtype != t.dtype),
    )
    if problems:
        raise CheckpointError(f"{directory} does not hold what its config.json promises:\n" + "\n".join(problems))
    return {name: found[name] for name in specs if name in found}


def _report(problems: list[str], what: str, lines: Iterable[str]) -> None:
    listed = list(lines)
    if listed:
        rest = [f"    ... and {len(listed) - SHOWN} more"] if len(listed) > SHOWN else []
        problems.append("\n".join([f"  {len(listed)} {what}:", *(f"    {line}" for line in listed[:SHOWN]), *rest]))


def _from_files(directory: Path, names: Iterable[str], problems: list[str]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name in names:
        try:
            header = read_header(directory / name)
        except CheckpointError as error:
            problems.append(f"  {error}")
            continue
        for tensor_name, tensor in header.items():
            if tensor_name in found:
                problems.append(f"  {tensor_name} stands twice: in {found[tensor_name].file.name} and in {name}")
            found[tensor_name] = tensor
    return found


def _from_index(
    directory: Path, specs: Mapping[str, TensorSpec], groups: Collection[str], problems: list[str]
) -> dict[str, StoredTensor]:
    """Tensors of all shards that the index names. A shard that holds nothing required may be absent."""
    try:
        weight_map = json.loads((directory / INDEX_NAME).read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, list[str]] = {}
        for tensor_name, file_name in weight_map.items():
            if not isinstance(file_name, str):
                raise TypeError(f"{tensor_name} is mapped to {file_name!r}")
            shards.setdefault(file_name, []).append(tensor_name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / INDEX_NAME} is damaged ({error!r}); download it again") from None
    present = []
    for file_name, members in sorted(shards.items()):
        if not file_name or Path(file_name).name != file_name:
            problems.append(f"  {INDEX_NAME} names the file {file_name!r}, which is outside the checkpoint directory")
        elif (
            any(name not in specs or specs[name].group in groups for name in members)
            or (directory / file_name).exists()
        ):
            present.append(file_name)
    found = _from_files(directory, present, problems)
    _report(
        problems,
        f"tensors stand in another file than {INDEX_NAME} says",
        (
            f"{name}: {found[name].file.name}, not {file_name}"
            for name, file_name in weight_map.items()
            if name in found and found[name].file.name != file_name
        ),
    )
    _report(problems, f"tensors are absent from {INDEX_NAME}", (name for name in found if name not in weight_map))
    return found
