"""Settings of the engine: frozen, built once at the edge (LLM or the command line), checked when built."""

from dataclasses import dataclass

BLOCK_SIZE = 128  # tokens per block of the cache (spec/engine.md section 0: B)
VERIFY_ROWS = 6  # rows that one verify step may write, 1 target + up to 5 drafts (spec/engine.md section 0: G)
PREFIX_MODES = ("off", "exact", "bounded")
KV_FORMATS = ("float32", "bfloat16", "packed", "hopper")
QUEUE_POLICIES = ("first-come", "fair")


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

    kv_format: str = "float32"
    """How cache records are stored: "float32" and "bfloat16" (parity), "packed" (288 + 68 + 528 bytes at the real
    sizes, the values that the bfloat16 numerics round to anyway), "hopper" (the same values, as the GPU kernels read
    them)."""
    prefix_caching: str = "exact"
    """"off"; "exact": a hit gives the tokens of a cold run; "bounded": a hit without a stored window recomputes one
    window only, an approximation (spec/engine.md 3.2)."""
    window_entries: int = 0
    """Windows kept in host memory for later hits; 0 = every hit recomputes its window."""
    truncation: bool = False
    """In prefill, layers after the last KV source run on the last `keep_tokens` positions only, an approximation
    (spec/engine.md 3.8)."""
    keep_tokens: int = 140
    """Rows that truncation keeps: the window plus two verify widths, 128 + 2 x 6."""
    drafts: int = 0
    """Drafts verified per step and sequence at most, "nextn"; window rings are that much longer."""
    varlen: bool = False
    """How many drafts a step verifies follows from their confidence and from what a step costs (spec/dspark.md 4);
    False: as many as there is room for."""
    batch_invariant: bool = False
    """Every request is reproducible: its tokens and logprobs do not depend on other requests, on drafts, or on which
    of them were verified (spec/engine.md 8)."""
    overlap: bool = False
    """Schedule the next step while one runs."""
    queue_policy: str = "first-come"
    """Order of waiting requests of one priority: "first-come", or "fair" between tenants."""
    long_prefill_tokens: int | None = None
    """Longest prefill chunk of one sequence while others wait; None = no such bound."""
    prefill_interval: int = 0
    """Decode steps between two steps with prefill, while sequences decode; 0 = prefill in every step."""
    offload_tokens: int = 1024
    """A preempted sequence of at least this length is copied to host memory instead of computed again, where
    `offload_bytes` has room (77K tokens: 1.4 ms against 1.3 s, spec/engine.md 4.4)."""
    offload_bytes: int = 0
    """Host memory for preempted sequences; 0 = they are always computed again."""
    graph_rows: int = 0
    """Rows of the largest decode or verify step that runs padded, on a GPU as a CUDA graph; 0 = none does."""

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
        for name, value, known in (
            ("kv_format", self.kv_format, KV_FORMATS),
            ("prefix_caching", self.prefix_caching, PREFIX_MODES),
            ("queue_policy", self.queue_policy, QUEUE_POLICIES),
        ):
            if value not in known:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(known)}")
        for name in ("window_entries", "drafts", "prefill_interval", "offload_tokens", "offload_bytes", "graph_rows"):
            check_whole_number(name, getattr(self, name), least=0)
        if self.drafts > VERIFY_ROWS - 1:
            raise ValueError(
                f"drafts: {self.drafts} is more than a verify step of {VERIFY_ROWS} rows can check; use at most "
                f"{VERIFY_ROWS - 1}"
            )
        for name in ("varlen", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: must be True or False, got {getattr(self, name)!r}")
        check_whole_number("keep_tokens", self.keep_tokens)
        if self.long_prefill_tokens is not None:
            check_whole_number("long_prefill_tokens", self.long_prefill_tokens)
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed: must be from 0 to 2**64 - 1, or None, got {self.seed!r}")


def check_whole_number(name: str, value: object, least: int = 1) -> None:
    """Raises ValueError naming the argument unless it is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: must be a whole number >= {least}, got {value!r}")


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)
