"""Settings of the engine: frozen, built once at the edge (LLM or the command line), checked when built."""

from dataclasses import dataclass

BLOCK_SIZE = 128  # tokens per block of the cache (spec/engine.md section 0: B)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What one engine may use. Raises ValueError naming the field, with the nearest setting that works."""

    max_model_len: int
    """Longest prompt plus output, in tokens."""
    max_num_seqs: int
    """Sequences that may hold a slot at once."""
    max_num_batched_tokens: int
    """Tokens that one step may compute, decodes and prefill chunks together."""
    num_blocks: int
    """Blocks of 128 tokens in the cache."""
    prompt_logprobs_chunk: int = 512
    """Longest prefill chunk while prompt_logprobs are collected: 512 rows x 129,280 ids x 4 bytes = 265 MB."""
    seed: int | None = None
    """Seed of the seeds that requests without one get; None = the operating system's randomness."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "prompt_logprobs_chunk"):
            check_whole_number(name, getattr(self, name))
        if self.max_model_len < 2:
            raise ValueError("max_model_len: must be at least 2, one token of prompt and one of output")
        if self.max_num_batched_tokens < self.max_num_seqs:
            # every running sequence decodes one token per step
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is less than "
                f"max_num_seqs = {self.max_num_seqs}; raise the first or lower the second"
            )
        needed = blocks_for(self.max_model_len)
        if self.num_blocks < needed:
            # a single sequence of full length must fit, or the oldest one could wait for ever
            raise ValueError(
                f"num_blocks: {self.num_blocks} blocks of {BLOCK_SIZE} tokens cannot hold one sequence of "
                f"max_model_len = {self.max_model_len}; use num_blocks >= {needed} "
                f"or max_model_len <= {self.num_blocks * BLOCK_SIZE}"
            )
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed: must be from 0 to 2**64 - 1, or None, got {self.seed!r}")


def check_whole_number(name: str, value: object) -> None:
    """Raises ValueError naming the argument unless it is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: must be a whole number >= 1, got {value!r}")


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)
