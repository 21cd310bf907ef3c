"""The name of a block's content: a chain of hashes, so that one hash stands for every token up to the block's end.

    h_0 = H(namespace)
    h_i = H(h_{i-1}, the 128 token ids of block i - 1, its extras)

H is SHA-256 cut to 128 bits (spec/engine.md 2.4): a tenant must not be able to craft two prompts with one hash.
Everything that the content depends on besides the tokens is in the namespace, so chains of other models, formats or
salts never meet, and one index serves them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np

from deepinfer.cache.blocks import BLOCK_TOKENS

DIGEST_BYTES = 16
_BLOCK_BYTES = 4 * BLOCK_TOKENS  # ids as little-endian uint32


def namespace(model_digest: bytes | str, kv_format: str, layout_version: int, salt: str = "") -> bytes:
    """What every block of a chain depends on. The same in every process that runs the same model.

    model_digest: of the weights and the config. layout_version: of the records' bytes. salt: requests share prefixes
    only with requests of the same salt.
    """
    parts = [model_digest, kv_format, str(layout_version), salt]
    encoded = [part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in encoded)  # lengths: no two lists look alike


class HashChain:
    """The hashes of a sequence's full blocks, as far as they are known."""

    def __init__(self, namespace: bytes) -> None:
        self.root = sha256(namespace).digest()[:DIGEST_BYTES]  # h_0
        self.hashes: list[bytes] = []  # hashes[i] = h_{i+1} covers tokens 0 .. 128 (i + 1) - 1

    def extend(self, token_ids: np.ndarray | Sequence[int], extras: Mapping[int, bytes] | None = None) -> None:
        """Hash the full blocks that are not hashed yet: O(new tokens).

        token_ids: integers [n], all known tokens of the sequence from its first. extras: what a block's content depends
        on besides ids and past (pictures), by number of the block.
        """
        done, known = len(self.hashes), len(token_ids) // BLOCK_TOKENS
        if known <= done:
            return
        new = np.asarray(token_ids[done * BLOCK_TOKENS : known * BLOCK_TOKENS]).astype("<u4").tobytes()
        last = self.hashes[-1] if self.hashes else self.root
        found: list[bytes] = []
        for start in range(0, len(new), _BLOCK_BYTES):
            content = last + new[start : start + _BLOCK_BYTES]
            if extras is not None:
                content += extras.get(done + len(found), b"")
            last = sha256(content).digest()[:DIGEST_BYTES]
            found.append(last)
        self.hashes += found

    def digest(self, num_tokens: int) -> bytes:
        """The hash of the first `num_tokens` tokens, a multiple of 128 that is hashed already."""
        return self.hashes[num_tokens // BLOCK_TOKENS - 1] if num_tokens else self.root

    def copy(self) -> HashChain:
        """For a fork: the same past, a future of its own."""
        twin = object.__new__(HashChain)
        twin.root, twin.hashes = self.root, self.hashes.copy()
        return twin
