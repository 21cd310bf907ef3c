"""The model that is served, as the server knows it: names, tokenizer, and what a checkpoint says about sampling."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deepinfer.codec.spellings import DSML, role_ids
from deepinfer.codec.tokenizer import Tokenizer
from deepinfer.engine.settings import Settings
from deepinfer.model.config import ModelConfig
from deepinfer.model.digest import model_digest
from deepinfer.server.errors import model_not_found
from deepinfer.server.settings import ANY_MODEL

DEFAULTS = ("temperature", "top_p", "top_k")
"""What generation_config.json may say about sampling."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    path: Path
    names: tuple[str, ...]
    """That requests may use; the first one is the model's own."""
    any_name: bool
    tokenizer: Tokenizer
    vocab_size: int
    defaults: Mapping[str, float]
    """Of SamplingParams, for what a request does not say."""
    role_ids: frozenset[int]
    """That end an answer, for none holds them."""
    call_id: int | None
    """With which every call begins."""
    fingerprint: str
    """Same weights, settings and release."""
    created: int
    """Unix seconds."""

    @classmethod
    def load(cls, path: Path, settings: Settings, names: tuple[str, ...] = ()) -> ServedModel:
        """Reads everything but the weights. ValueError or OSError naming the file."""
        tokenizer = Tokenizer.from_directory(path)
        config = ModelConfig.from_dir(path)
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(f"{path}: tokenizer.json has {tokenizer.vocab_size} ids, the model {config.vocab_size}")
        own = tuple(name for name in names if name != ANY_MODEL) or (path.name,)
        what = f"{version('deepinfer')} {settings.dtype} {settings.kv_format} {settings.prefix_caching}"
        return cls(
            path=path,
            names=own,
            any_name=ANY_MODEL in names,
            tokenizer=tokenizer,
            vocab_size=config.vocab_size,
            defaults=_sampling_defaults(path / "generation_config.json"),
            role_ids=role_ids(tokenizer),
            call_id=tokenizer.control_ids.get(DSML),
            fingerprint="fp_" + sha256(model_digest(path) + what.encode()).hexdigest()[:12],
            created=int(time.time()),
        )

    @property
    def probe_id(self) -> int:
        """Of a prompt that every model has an answer to."""
        bos = self.tokenizer.bos_token_id
        return 0 if bos is None else bos

    @property
    def name(self) -> str:
        return self.names[0]

    def describe_defaults(self) -> str:
        """A line for the start."""
        said = ", ".join(f"{name} {value:g}" for name, value in self.defaults.items())
        return f"where a request says nothing: {said} (generation_config.json)" if said else "temperature 1 by default"

    def check_name(self, name: str) -> None:
        """RequestError 404 for a name that is not served."""
        if not self.any_name and name not in self.names:
            raise model_not_found(name, self.names)


def _sampling_defaults(file: Path) -> dict[str, float]:
    """Of a checkpoint that says nothing: none."""
    if not file.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if content.get("do_sample") is False:
            return {"temperature": 0.0}
        given = {name: content[name] for name in DEFAULTS if content.get(name) is not None}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: not a JSON object ({error})") from error
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{file}: {name} must be a number, got {value!r}")
    return given


def list_entry(model: ServedModel, name: str, context: int | None) -> dict[str, Any]:
    """OpenAI's object for a model. context: tokens, None while it is loading."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "deepinfer",
        "root": model.name,
        "max_model_len": context,
    }


def anthropic_entry(model: ServedModel, name: str, context: int | None) -> dict[str, Any]:
    """Anthropic's. Prompt and answer share the context."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created))
    limits = {"max_input_tokens": context, "max_tokens": context}
    return {"type": "model", "id": name, "display_name": name, "created_at": created, **limits}
