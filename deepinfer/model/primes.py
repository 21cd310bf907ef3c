"""Row counts of the Engram tables: consecutive primes, one per hash column.

Source: model.md 2.3 "Bucket layout". Primes are never reused across orders or layers, so the order of the layer list
fixes every table size; the released sums 384006168 and 384016682 follow from the start 16000000.
"""

from __future__ import annotations

from functools import lru_cache


def is_prime(n: int) -> bool:
    """True for a prime. Trial division: 4000 steps at the released size (sqrt of 16e6)."""
    if n < 4:
        return n > 1
    if n % 2 == 0:
        return False
    divisor = 3
    while divisor * divisor <= n:
        if n % divisor == 0:
            return False
        divisor += 2
    return True


@lru_cache(maxsize=64)
def engram_primes(
    num_layers: int, num_orders: int, num_heads: int, start: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Primes `[layer][order][head]`: the bucket count of each hash column.

    num_orders = max n-gram size - 1 (2-grams up to n-grams). The first prime is the smallest one >= start, every
    later one the next above its predecessor, heads fastest, then orders, then layers.
    """
    candidate = max(start, 2)
    layers = []
    for _ in range(num_layers):
        orders = []
        for _ in range(num_orders):
            heads = []
            for _ in range(num_heads):
                while not is_prime(candidate):
                    candidate += 1
                heads.append(candidate)
                candidate += 1
            orders.append(tuple(heads))
        layers.append(tuple(orders))
    return tuple(layers)
