"""Writing and reading checkpoints in the released layout: names, packing, shards and index."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from training import quant
from training.config import NanoConfig
from training.model import NanoModel

SHARD_BYTES = 14_500_000
Entry = tuple[str, str, str, tuple[int, ...]]  # file name, format, parameter, index into the stack
_PLAIN = {  # stacked parameter -> name behind "layers.L.", BF16 in the file
    "attn_norm": "attn_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "q_norm": "attn.q_norm.weight",
    "kv_norm": "attn.kv_norm.weight",
    "gate": "ffn.gate.weight",
}
_FP8 = {
    "wq_a": "attn.wq_a",
    "wq_b": "attn.wq_b",
    "wkv": "attn.wkv",
    "wo_a": "attn.wo_a",
    "wo_b": "attn.wo_b",
    "sw2": "ffn.shared_experts.w2",
}


def block_entries(at: str, i: int, experts: int) -> Iterator[Entry]:
    """What a backbone layer and a draft stage share, under the prefix `at`, from place `i` of each stack."""
    for parameter, name in _PLAIN.items():
        yield at + name, "bf16", parameter, (i,)
    for parameter, name in _FP8.items():
        yield at + name, "fp8", parameter, (i,)
    yield at + "attn.attn_sink", "f32", "sink", (i,)
    yield at + "ffn.gate.bias", "f32", "gate_bias", (i,)
    for part, name in enumerate(("w1", "w3")):
        yield at + f"ffn.shared_experts.{name}", "fp8", "sw13", (i, part)
    for expert in range(experts):
        for part, name in enumerate(("w1", "w3")):
            yield at + f"ffn.experts.{expert}.{name}", "fp4", "w13", (i, expert, part)
        yield at + f"ffn.experts.{expert}.w2", "fp4", "w2", (i, expert)
    for sub, kind in enumerate(("attn", "ffn")):
        for name in ("fn", "base", "scale"):
            yield at + f"hc_{kind}_{name}", "f32", f"hc_{name}", (i, sub)


def entries(config: NanoConfig) -> Iterator[Entry]:
    """(file name, format, parameter, index into the stack) of every tensor; format is bf16, f32, fp8, rows or fp4."""
    c = config
    yield "embed.weight", "bf16", "embed", ()
    yield "head.weight", "bf16", "head", ()
    yield "norm.weight", "bf16", "norm", ()
    gated = [s for s in c.kv_source_layer_ids if c.ratio(s) == 2]
    for layer in range(c.num_hidden_layers):
        at = f"layers.{layer}."
        yield from block_entries(at, layer, c.n_routed_experts)
        yield at + "ffn.gate.bias_vl", "f32", "gate_bias", (layer,)
        if layer in c.kv_source_layer_ids:
            i = c.kv_source_layer_ids.index(layer)
            yield at + "attn.compressor.wkv.weight", "bf16", "comp_wkv", (i,)
            yield at + "attn.compressor.norm.weight", "bf16", "comp_norm", (i,)
            if layer in gated:
                yield at + "attn.compressor.wgate.weight", "bf16", "comp_wgate", (gated.index(layer),)
            yield at + "attn.indexer.wk.weight", "bf16", "idx_wk", (i,)
            yield at + "attn.indexer.k_norm.weight", "bf16", "idx_k_norm", (i,)
        if layer in c.index_source_layer_ids:
            i = c.index_source_layer_ids.index(layer)
            yield at + "attn.indexer.wq_b", "fp8", "idx_wq_b", (i,)
            yield at + "attn.indexer.weights_proj.weight", "bf16", "idx_weights", (i,)
        if layer in c.engram_layer_ids:
            i = c.engram_layer_ids.index(layer)
            yield at + "engram.embed", "rows", f"tables.{i}", ()
            yield at + "engram.wkv", "fp8", "engram_wkv", (i,)
            yield at + "engram.q_weight", "bf16", "engram_q", (i,)
            yield at + "engram.k_weight", "bf16", "engram_k", (i,)


def _stack(model: NanoModel, parameter: str, index: tuple[int, ...]) -> Tensor:
    """View of one tensor of a stack; wo_a comes as [groups * rank, width]."""
    if parameter.startswith("tables."):
        return model.tables[int(parameter.split(".")[1])]
    view = getattr(model, parameter)[index] if index else getattr(model, parameter)
    return view.flatten(0, 1) if parameter == "wo_a" else view


def pack(name: str, kind: str, value: Tensor) -> dict[str, Tensor]:
    """One tensor as it stands in the file: itself, or packed weight and scales."""
    value = value.detach().float().cpu().contiguous()
    if kind == "bf16":
        return {name: value.bfloat16()}
    if kind == "f32":
        return {name: value.clone()}
    quantise = {"fp8": quant.quant_fp8_tiles, "rows": quant.quant_fp8_rows, "fp4": quant.quant_fp4_rows}[kind]
    grid, scale = quantise(value)
    weight = quant.pack_fp4(grid) if kind == "fp4" else grid.to(torch.float8_e4m3fn)
    return {f"{name}.weight": weight, f"{name}.scale": quant.scale_bytes(scale)}


@torch.no_grad()
def export_tensors(model: NanoModel) -> dict[str, Tensor]:
    """All tensors of the checkpoint, on the CPU, in file dtypes."""
    out: dict[str, Tensor] = {}
    for name, kind, parameter, index in entries(model.config):
        out |= pack(name, kind, _stack(model, parameter, index))
    return out


def export_model(model: NanoModel, folder: str | Path) -> int:
    """Writes config.json, shards below 15 MB, the index and generation_config.json; returns the bytes of tensors."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in export_tensors(model).items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    total = sum(t.nbytes for shard in shards for t in shard.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    write_json(folder / "model.safetensors.index.json", index)
    # Draft stages join later (see draft_export); until then the configuration must not promise them.
    write_json(folder / "config.json", dataclasses.replace(model.config, num_nextn_predict_layers=0).to_json())
    generation = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    write_json(folder / "generation_config.json", generation)
    return total


def write_json(path: Path, tree: object) -> None:
    """Writes indented UTF-8 JSON."""
    path.write_text(json.dumps(tree, ensure_ascii=False, indent=1) + "\n")


def unpack(tensors: dict[str, Tensor], name: str, kind: str) -> Tensor:
    """Inverse of pack, float32."""
    if kind in ("bf16", "f32"):
        return tensors[name].float()
    packed, scale = tensors[f"{name}.weight"], quant.scale_values(tensors[f"{name}.scale"])
    grid = quant.unpack_fp4(packed) if kind == "fp4" else packed.float()
    return quant.dequant_tiles(grid, scale) if kind == "fp8" else quant.dequant_rows(grid, scale)


@torch.no_grad()
def load_export(model: NanoModel, folder: str | Path) -> None:
    """Fills a model with the dequantised tensors of a checkpoint folder."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("model*.safetensors")):
        with safe_open(file, "pt") as reader:
            tensors |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    for name, kind, parameter, index in entries(model.config):
        if name.endswith("bias_vl"):
            continue
        value = unpack(tensors, name, kind)
        target = getattr(model, parameter) if not parameter.startswith("tables.") else model.tables[int(parameter[7:])]
        (target[index] if index else target).view(value.shape).copy_(value)
