"""Other people's kernels, timed beside ours in the same run where they are at hand. Nothing here is shipped or needed.

They are read from a folder that holds what vLLM's wheel unpacks to (`--peers DIR`, or a .tar.xz of the same files):

    pip download vllm==0.33.0 --no-deps && unzip vllm-*.whl -d DIR   # then --peers DIR/vllm

FlashMLA (`_flashmla_C.abi3.so`), DeepGEMM (`third_party/deep_gemm`: compiles at first use, needs CUDA's nvcc) and
triton_kernels (`third_party/triton_kernels`). What torch itself brings needs no folder. A peer builds random inputs of
a case's shape in its own formats; whether its numbers are right is its authors' business, so no peer has a check.

Names (`KernelCase.peer_key`) and the shapes they read:
    torch_fp8, torch_bf16, deepgemm              m, n, k
    flashmla_decode                              batch, rows, heads, window, selected [, layers of one pool]
    flashmla_prefill                             queries, heads, keys
    triton_kernels                               tokens, slots, experts, n, k
    torch_topk                                   rows, entries, k
"""

from __future__ import annotations

import importlib
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernel_cases import Prepared, copies_beyond_cache
from torch import Tensor

V4_RECORD = 584  # bytes of an entry of the record that FlashMLA reads: 448 e4m3, 64 bf16, 7 scales and a pad byte
V4_PAGE = 64  # entries of a page; a page holds all data rows, then all scale rows
POOL_ENTRIES = 262_144  # of each pool that rows are gathered from, as in the project's own cases


class Peers:
    """The peers that a folder has. `prepare` raises LookupError where a peer is not at hand."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = _unpacked(folder) if folder is not None else None
        self._loaded: dict[str, Any] = {}

    def prepare(self, name: str, shape: dict[str, int], device: torch.device) -> Prepared:
        """A peer's launch at this shape, on the device. Whatever the peer raises passes through."""
        if name not in PEERS:
            raise LookupError(f"no peer is called {name!r}; there is {', '.join(PEERS)}")
        return PEERS[name](self, shape, device)

    def _file(self, path: str) -> Path:
        found = self._folder / path if self._folder is not None else None
        if found is None or not found.exists():
            raise LookupError(f"{path} is not at hand (--peers)")
        return found

    def _once(self, name: str, load: Callable[[], Any]) -> Any:
        if name not in self._loaded:
            self._loaded[name] = load()
        return self._loaded[name]

    def flashmla(self) -> Any:
        """torch.ops._flashmla_C"""
        file = self._file("_flashmla_C.abi3.so")
        self._once("flashmla", lambda: torch.ops.load_library(str(file)))
        return torch.ops._flashmla_C

    def deepgemm(self) -> Any:
        """torch.ops.deep_gemm, ready to compile."""

        def load() -> None:
            folder = self._file("third_party/deep_gemm")
            torch.ops.load_library(str(next(folder.glob("_C_extension*.so"))))
            os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
            torch.ops.deep_gemm.init(str(folder), "deep_gemm")

        self._once("deepgemm", load)
        return torch.ops.deep_gemm

    def triton_kernels(self, module: str) -> Any:
        """A module of triton_kernels."""
        folder = str(self._file("third_party/triton_kernels").parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        return importlib.import_module(f"triton_kernels.{module}")


def _unpacked(folder: Path) -> Path:
    """The folder itself, or a temporary one with what an archive holds."""
    archive = next(iter(sorted(folder.glob("*.tar.xz"))), None) if folder.is_dir() else folder
    if archive is None:
        return folder
    target = Path(tempfile.mkdtemp(prefix="peers-"))
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return target


def _copies(make: Callable[[], Any], nbytes: int) -> list[Any]:
    return [make() for _ in range(copies_beyond_cache(nbytes))]


def _fp8(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).to(torch.float8_e4m3fn)


def torch_fp8(peers: Peers, s: dict[str, int], device: torch.device) -> Prepared:
    """torch._scaled_mm with a scale per row and per column, full accumulation."""
    x, x_scale = _fp8(s["m"], s["k"], device=device), torch.rand(s["m"], 1, device=device)
    scale = torch.rand(1, s["n"], device=device)
    weights = _copies(lambda: _fp8(s["n"], s["k"], device=device), s["n"] * s["k"])

    def run(copy: int) -> Tensor:
        product: Tensor = torch._scaled_mm(
            x, weights[copy].t(), scale_a=x_scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=False
        )
        return product

    return Prepared(run, len(weights))


def torch_bf16(peers: Peers, s: dict[str, int], device: torch.device) -> Prepared:
    """A bfloat16 product: what a matrix costs that has been widened."""
    x = torch.randn(s["m"], s["k"], device=device, dtype=torch.bfloat16)
    weights = _copies(lambda: torch.randn(s["n"], s["k"], device=device, dtype=torch.bfloat16), 2 * s["n"] * s["k"])
    return Prepared(lambda copy: torch.mm(x, weights[copy].t()), len(weights))


def deepgemm(peers: Peers, s: dict[str, int], device: torch.device) -> Prepared:
    """FP8 with scales per 128 of a row and per 128 x 128 tile of the weight: its own format, not the model's."""
    m, n, k = s["m"], s["n"], s["k"]
    if n % 128 or k % 128:
        raise LookupError("its weights are cut into 128 x 128 tiles")
    ops = peers.deepgemm()
    x = _fp8(m, k, device=device)
    x_scale = ops.get_mn_major_tma_aligned_tensor(torch.rand(m, k // 128, device=device))
    scale = torch.rand(n // 128, k // 128, device=device)
    weights = _copies(lambda: _fp8(n, k, device=device), n * k)
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)

    def run(copy: int) -> Tensor:
        ops.fp8_fp4_gemm_nt(x, x_scale, weights[copy], scale, out)
        return out

    run(0)  # compiles
    return Prepared(run, len(weights))


def _v4_pool(device: torch.device) -> Tensor:
    """uint8 [pages, 64, 1, 584]: values of ordinary size in the record of V4, a page padded to a multiple of 576 B."""
    page = -(-V4_PAGE * V4_RECORD // 576) * 576
    raw = torch.randint(0x28, 0x40, (POOL_ENTRIES // V4_PAGE, page), dtype=torch.uint8, device=device)
    raw[:, V4_PAGE * 576 :] = 120  # E8M0: 2^-7
    return raw.as_strided((raw.shape[0], V4_PAGE, 1, V4_RECORD), (page, V4_RECORD, V4_RECORD, 1))


def flashmla_decode(peers: Peers, s: dict[str, int], device: torch.device) -> Prepared:
    """Sparse decode over V4 records: `batch` requests of `rows` queries each, a window and selected entries."""
    ops = peers.flashmla()
    rows = s["batch"] * s["rows"]
    q = torch.randn(rows, 1, s["heads"], 512, device=device, dtype=torch.bfloat16)
    sink = torch.zeros(s["heads"], device=device)
    window_pool, pool = _v4_pool(device), _v4_pool(device)

    def chosen(count: int) -> Tensor:
        return torch.randint(0, POOL_ENTRIES, (rows, 1, count), dtype=torch.int32, device=device)

    window = chosen(s["window"])
    extra = chosen(s["selected"]) if s.get("selected") else None
    state: list[Tensor | None] = [None, None]  # its schedule, made by the first launch

    def run(copy: int) -> Tensor:
        out, _, *schedule = ops.sparse_decode_fwd(
            q, window_pool, window, None, sink, *state, None if extra is None else pool, extra, None, 512, 512**-0.5
        )
        state[:] = schedule
        result: Tensor = out
        return result

    run(0)
    return Prepared(run)


def flashmla_prefill(peers: Peers, s: dict[str, int], device: torch.device) -> Prepared:
    """Sparse prefill: keys are bfloat16 rows already."""
    ops = peers.flashmla()
    q = torch.randn(s["queries"], s["heads"], 512, device=device, dtype=torch.bfloat16)
    keys = torch.randn(65_536, 1, 512, device=device, dtype=torch.bfloat16)
    chosen = torch.randint(0, 65_536, (s["queries"], 1, s["keys"]), dtype=torch.int32, device=device)
    sink = torch.zeros(s["heads"], device=device)
    return Prepared(lambda copy: ops.sparse_prefill_fwd(q, keys, chosen, 512**-0.5, 512, sink, None, None))


def triton_kernels(peers: Peers, s: dict[str, int], device: torch.device) -> Prepared:
    """MXFP4 experts times bfloat16 rows, gathered: [tokens x slots, k] x [experts, n, k]. Routing is not included."""
    ogs, numerics = peers.triton_kernels("matmul_ogs"), peers.triton_kernels("numerics")
    tensor, layout = peers.triton_kernels("tensor"), peers.triton_kernels("tensor_details.layout")
    flags, routing = peers.triton_kernels("matmul_ogs_details.opt_flags"), peers.triton_kernels("routing")
    flags.update_opt_flags_constraints({"split_k": 1})
    codes = torch.randint(0, 256, (s["experts"], s["n"], s["k"] // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(118, 124, (s["experts"], s["n"], s["k"] // 32), dtype=torch.uint8, device=device)
    form, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_form, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    wrapped = tensor.wrap_torch_tensor(codes.transpose(-2, -1), dtype=tensor.FP4)
    weight = tensor.convert_layout(wrapped, form, **options)
    scale = tensor.convert_layout(tensor.wrap_torch_tensor(scales.transpose(-2, -1)), scale_form, **scale_options)
    del codes, scales
    context = ogs.FlexCtx(rhs_data=numerics.InFlexData())
    precision = ogs.PrecisionConfig(weight_scale=scale, flex_ctx=context, out_dtype=torch.bfloat16)
    x = torch.randn(s["tokens"], s["k"], device=device, dtype=torch.bfloat16)
    logits = torch.randn(s["tokens"], s["experts"], device=device)
    power_of_two = s["slots"] & (s["slots"] - 1) == 0
    plan, gather, _ = (routing.routing if power_of_two else routing.routing_torch)(logits, s["slots"])

    def run(copy: int) -> Tensor:
        out: Tensor = ogs.matmul_ogs(x, weight, None, plan, gather_indx=gather, precision_config=precision)
        return out

    run(0)
    return Prepared(run)


def torch_topk(peers: Peers, s: dict[str, int], device: torch.device) -> Prepared:
    scores = _copies(lambda: torch.randn(s["rows"], s["entries"], device=device), 4 * s["rows"] * s["entries"])
    return Prepared(lambda copy: torch.topk(scores[copy], s["k"], dim=1), len(scores))


PEERS: dict[str, Callable[[Peers, dict[str, int], torch.device], Prepared]] = {
    "torch_fp8": torch_fp8,
    "torch_bf16": torch_bf16,
    "deepgemm": deepgemm,
    "flashmla_decode": flashmla_decode,
    "flashmla_prefill": flashmla_prefill,
    "triton_kernels": triton_kernels,
    "torch_topk": torch_topk,
}
