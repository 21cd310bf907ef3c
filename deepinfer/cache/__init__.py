"""Where context lives: paged compressed records, window rings, open rows, last tokens; what is kept and shared.

Two sides. The host's (manager.py and what it names: blocks, hashing, prefix, windows, offload, events) decides with ids
and hashes; the device's (storage.py and what it names: records, step, formats, host_memory) holds the tensors. They are
joined by the orders of edits.py alone. Nothing outside this folder knows what a block id means.

`Cache.for_model(model, max_num_seqs=, num_blocks=)` is both in one, for use without an engine.
"""

from deepinfer.cache.blocks import BLOCK_TOKENS, CacheFullError, blocks_for
from deepinfer.cache.cache import Cache
from deepinfer.cache.manager import CacheManager
from deepinfer.cache.storage import CacheStorage

__all__ = ["BLOCK_TOKENS", "Cache", "CacheFullError", "CacheManager", "CacheStorage", "blocks_for"]
