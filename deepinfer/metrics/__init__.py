"""What the engine counts, the line it logs, and how both reach Prometheus. A leaf: imports nothing of ours."""

from deepinfer.metrics.drafts import DraftStats
from deepinfer.metrics.log_line import LogLine
from deepinfer.metrics.prometheus import EngineMetrics
from deepinfer.metrics.stats import EngineStats, RequestStats, StepStats

__all__ = ["DraftStats", "EngineMetrics", "EngineStats", "LogLine", "RequestStats", "StepStats"]
