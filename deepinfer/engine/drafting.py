"""How many drafts a step verifies at most on this checkpoint, and what is said about drafting at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.config import VERIFY_ROWS, EngineConfig

if TYPE_CHECKING:
    from deepinfer.engine.settings import Settings
    from deepinfer.model.config import ModelConfig


def draft_length(settings: Settings, model: ModelConfig) -> int:
    """Drafts per step and sequence at most, 0 = drafting is off.

    A number that the caller gave is had or refused (ValueError naming the nearest that works); the default and the
    environment's are cut to what the checkpoint gives.
    """
    most = min(model.dspark_block_size, VERIFY_ROWS - 1) if model.num_drafts else 0
    if settings.nextn <= most:
        return settings.nextn
    if not settings.nextn_asked:
        return most
    if not model.num_drafts:
        raise ValueError(
            f"nextn: {settings.nextn} tokens cannot be drafted, the checkpoint has no draft stages "
            "(num_nextn_predict_layers = 0); use nextn=0, or a checkpoint with mtp.* tensors"
        )
    raise ValueError(
        f"nextn: {settings.nextn} is more than the checkpoint drafts at once; use a number from 0 to {most} "
        f"(dspark_block_size = {model.dspark_block_size}, and a verify step has {VERIFY_ROWS} rows)"
    )


def describe_drafting(
    settings: Settings, model: ModelConfig, config: EngineConfig, costs: str = "", calibrated: bool = False
) -> tuple[str, ...]:
    """The printed lines. costs: what a step was measured to cost; calibrated: the checkpoint brings temperatures for
    its confidence head."""
    if not config.drafts:
        return (f"no drafting: {_why_not(settings, model)}",)
    asked = "" if settings.nextn == config.drafts else f" (not {settings.nextn}: as far as the checkpoint drafts)"
    lines = [
        f"drafting: up to {config.drafts} tokens per step{asked}, of blocks of {model.dspark_block_size}, by "
        f"{model.num_drafts} draft stages"
    ]
    if config.varlen:
        lines.append(f"  verified: as many as their confidence is worth, {costs}")
        lines.append(
            "  confidence: calibrated by dspark_calibration.json"
            if calibrated
            else "  confidence: as the head gives it, no dspark_calibration.json beside the weights"
        )
    else:
        lines.append("  verified: all that there is room for (mtp_varlen off)")
    lines.append(f"  acceptance: {_acceptance(config)}")
    return tuple(lines)


def _why_not(settings: Settings, model: ModelConfig) -> str:
    if not settings.nextn:
        return "nextn is 0"
    return f"nextn 0 instead of {settings.nextn}, the checkpoint has no draft stages"


def _acceptance(config: EngineConfig) -> str:
    coupled = "drafts change no token (a draft is kept where it equals the token drawn without it)"
    if every_request_is_reproducible(config.seed, config.batch_invariant):
        return f"for every request, {coupled}"
    return (
        f"with seq_seed or temperature 0, {coupled}; other requests by rejection sampling, which keeps more drafts and "
        "the exact distribution"
    )


def every_request_is_reproducible(seed: int | None, batch_invariant: bool) -> bool:
    """Whether every request's seed was asked for: then none is verified by rejection sampling."""
    return seed is not None or batch_invariant
