"""deepinfer: an inference engine and serving stack for DeepSeek-V4.1-Flash."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "InvalidRequestError", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from deepinfer.engine.errors import InvalidRequestError
    from deepinfer.engine.outputs import CompletionOutput, RequestOutput
    from deepinfer.engine.sampling_params import SamplingParams
    from deepinfer.llm import LLM

_HOMES = {
    "LLM": "deepinfer.llm",
    "SamplingParams": "deepinfer.engine.sampling_params",
    "RequestOutput": "deepinfer.engine.outputs",
    "CompletionOutput": "deepinfer.engine.outputs",
    "InvalidRequestError": "deepinfer.engine.errors",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first asked for: torch takes seconds to import, and `--help` needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'deepinfer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
