"""Where context lives: paged compressed records, window rings, open rows, last tokens.

Nothing outside this folder knows what a block id means. `Cache.for_model(model, max_num_seqs=, num_blocks=)` makes one.
"""

from deepinfer.cache.blocks import BLOCK_TOKENS, CacheFullError, blocks_for
from deepinfer.cache.cache import Cache

__all__ = ["BLOCK_TOKENS", "Cache", "CacheFullError", "blocks_for"]
