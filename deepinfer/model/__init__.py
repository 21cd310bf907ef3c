"""DeepSeek-V4.1: configuration, checkpoint, forward pass.

`load_model(path)` gives a `DeepseekV41`; `forward(chunks, cache)` runs one step over `Chunk`s of many sequences. Its
state lives in a cache made by `deepinfer.cache.Cache.for_model(model, max_num_seqs=, num_blocks=)`: the cache stands
above the model, so the model never makes one.
"""

from deepinfer.model.batch import Batch, Chunk
from deepinfer.model.config import ConfigError, ModelConfig
from deepinfer.model.load import load_model

__all__ = ["Batch", "Chunk", "ConfigError", "ModelConfig", "load_model"]
