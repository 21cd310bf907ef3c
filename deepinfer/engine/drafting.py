"""How many drafts a step verifies at most on this checkpoint, and what is said about drafting at start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.config import VERIFY_ROWS, EngineConfig
from deepinfer.speculation.calibration import FILE_NAME as CALIBRATION_FILE

if TYPE_CHECKING:
    from deepinfer.engine.settings import Settings
    from deepinfer.model.config import ModelConfig
    from deepinfer.speculation.budget import CostCurve, StepCosts


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
    settings: Settings, model: ModelConfig, config: EngineConfig, choice: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The printed lines. choice: those of `describe_choice`."""
    if not config.drafts:
        return (f"no drafting: {_why_not(settings, model)}",)
    asked = "" if settings.nextn == config.drafts else f" (not {settings.nextn}: as far as the checkpoint drafts)"
    varlen = "" if config.varlen else " (mtp_varlen off)"
    return (
        f"drafting: up to {config.drafts} tokens per step{asked}{varlen}, by {model.num_drafts} draft stages in blocks "
        f"of {model.dspark_block_size}",
        *(f"  {line}" for line in choice),
        f"  acceptance: {_acceptance(config)}",
    )


def describe_choice(policy: str, costs: StepCosts | None, calibrated: bool) -> tuple[str, ...]:
    """How drafts are chosen for verification: the planner's words, a few points of the measured costs, and whether the
    checkpoint brings temperatures for its confidence head."""
    lines = [f"verified: {policy}"]
    if costs is not None:
        lines.append(f"measured: {_points(costs.verify, 'row')}; drafting for {_points(costs.draft, 'sequence')}")
    found = "calibrated by" if calibrated else "as the head gives it, there is no"
    return (*lines, f"confidence: {found} {CALIBRATION_FILE}")


def _points(curve: CostCurve, unit: str) -> str:
    sizes = sorted({int(curve.sizes[i]) for i in (0, len(curve.sizes) // 2, -1)})
    return ", ".join(f"{size} {unit}{'s' * (size > 1)} {1000 * curve.at(size):.3g} ms" for size in sizes)


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
