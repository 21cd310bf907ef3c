"""From tensors to C: every function's argument types, declared once and checked by ctypes at each call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from torch import Tensor

from deepinfer.kernels.cpu.build import library
from deepinfer.kernels.cpu.threads import num_threads

# p = pointer (a contiguous CPU tensor, the address of a structure, or None), i = int64, f = float. The number of
# threads follows as a last int. The order is that of the C declarations in csrc/.
SIGNATURES = {
    "linear_packed": "piiipipi",
    "query_and_window_f32": "ppppippp",
    "grouped_output_f32": "ppppip",
    "moe_f32": "pppipppp",
    "hyper_step_f32": "ppppppippppp",
    "hyper_expand_f32": "ppppiip",
    "sparse_attention_f32": "piiippippipfp",
    "index_scores_f32": "pppppiiiiip",
    "top_entries_f32": "ppiiip",
    "candidate_mask_f32": "ppiiiip",
    "engram_inject_f32": "ppppiifp",
    "compress_pairs_f32": "pppiifp",
    "rms_norm_f32": "ppiifp",
    "apply_rope_f32": "pppiiiifp",
    "copy_rows": "pppii",
    "window_rows": "ppppiiiip",
    "entry_rows": "pippiiip",
    "block_rows": "pipiiip",
    "token_history": "ppppipiip",
    "table_rows_f32": "pppiiipp",
    "philox_uniform_f32": "ppppiiiip",
    "top_prefixes_f32": "ppiiip",
    "markov_chain_f32": "ppppiiiipp",
    "constrain_rows_f32": "ppppii",
}
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


@functools.cache
def _function(name: str) -> Callable[..., None]:
    handle = library().handle
    assert handle is not None, "select/ never comes here without a library"
    function = getattr(handle, name)
    function.argtypes = [*(_TYPES[letter] for letter in SIGNATURES[name]), ctypes.c_int]
    function.restype = None
    return function


def call(name: str, *arguments: Tensor | int | float | None) -> None:
    """Run the C function `name`; the number of threads follows the arguments."""
    values = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            assert argument.is_contiguous(), name
            argument = argument.data_ptr()
        values.append(argument)
    _function(name)(*values, num_threads())
