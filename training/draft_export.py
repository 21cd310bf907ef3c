"""Draft tensors in the released layout: names, packing, and how they join a checkpoint whose backbone is finished.

    python -m training.draft_export DRAFT.safetensors --model models/nano

adds the tensors that `training.train_draft` wrote to the last shard of the checkpoint and announces them in
config.json. No tensor of the backbone is packed again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.config import NanoConfig
from training.draft import DraftModel
from training.export import Entry, block_entries, pack, unpack, write_json


def with_stages(config: NanoConfig, stages: int = 2) -> NanoConfig:
    """The configuration with draft stages of the sizes of `NanoConfig`'s defaults."""
    sizes = {f.name: getattr(NanoConfig(), f.name) for f in dataclasses.fields(NanoConfig) if "dspark" in f.name}
    sizes["dspark_noise_token_id"] = config.dspark_noise_token_id
    ratios = config.compress_ratios[: config.num_hidden_layers] + [0] * stages
    return dataclasses.replace(config, **sizes, num_nextn_predict_layers=stages, compress_ratios=ratios)


def entries(config: NanoConfig) -> Iterator[Entry]:
    """Every draft tensor, as export.entries has the backbone's."""
    last = config.num_nextn_predict_layers - 1
    for stage in range(last + 1):
        at = f"mtp.{stage}."
        if stage == 0:
            yield at + "main_proj", "fp8", "main_proj", ()
            yield at + "main_norm.weight", "bf16", "main_norm", ()
        yield from block_entries(at, stage, config.dspark_n_routed_experts)
        if stage == last:
            yield at + "norm.weight", "bf16", "norm", ()
            yield at + "markov_head.embed.weight", "bf16", "markov_embed", ()
            yield at + "markov_head.head.weight", "bf16", "markov_head", ()
            yield at + "confidence_head.proj.weight", "bf16", "confidence", ()


def _view(draft: DraftModel, parameter: str, index: tuple[int, ...]) -> Tensor:
    """View of one tensor of a stack; wo_a comes as [groups * rank, width]."""
    view = getattr(draft, parameter)[index] if index else getattr(draft, parameter)
    return view.flatten(0, 1) if parameter == "wo_a" else view


@torch.no_grad()
def draft_tensors(draft: DraftModel) -> dict[str, Tensor]:
    """All `mtp.*` tensors, on the CPU, in file dtypes."""
    out: dict[str, Tensor] = {}
    for name, kind, parameter, index in entries(draft.config):
        out |= pack(name, kind, _view(draft, parameter, index))
    return out


@torch.no_grad()
def load_draft(draft: DraftModel, tensors: dict[str, Tensor]) -> None:
    """Fills a draft model with dequantised `mtp.*` tensors."""
    for name, kind, parameter, index in entries(draft.config):
        target = _view(draft, parameter, index)
        target.copy_(unpack(tensors, name, kind).view(target.shape))


def read_draft(folder: str | Path) -> dict[str, Tensor]:
    """The `mtp.*` tensors of a checkpoint folder."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        with safe_open(file, "pt") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys() if name.startswith("mtp.")}  # noqa: SIM118
    return tensors


def join(tensors: dict[str, Tensor], folder: str | Path, config: NanoConfig) -> int:
    """Puts draft tensors into the last shard of a checkpoint, in place of any it has; returns their bytes.

    `config` becomes the checkpoint's configuration.
    """
    folder = Path(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    places = {name: file for name, file in index["weight_map"].items() if not name.startswith("mtp.")}
    last = max(places.values())
    kept = {name: tensor for name, tensor in load_file(folder / last).items() if name in places}
    order = [name for name, file in places.items() if file == last]
    save_file({name: kept[name] for name in order} | tensors, folder / last, metadata={"format": "pt"})
    (folder / last).chmod(0o644)  # save_file makes it private
    places |= dict.fromkeys(tensors, last)
    index["metadata"]["total_size"] = sum(
        t.nbytes for file in sorted(set(places.values())) for t in load_file(folder / file).values()
    )
    write_json(path, {"metadata": index["metadata"], "weight_map": places})
    write_json(folder / "config.json", config.to_json())
    return sum(t.nbytes for t in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--model", type=Path, default=Path("models/nano"))
    parser.add_argument("--stages", type=int, default=2)
    args = parser.parse_args()
    size = join(load_file(args.draft), args.model, with_stages(NanoConfig.load(args.model), args.stages))
    whole = sum(file.stat().st_size for file in args.model.iterdir())
    print(f"{size:,} bytes of draft tensors; {args.model} now holds {whole:,} bytes")


if __name__ == "__main__":
    main()
