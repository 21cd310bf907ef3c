"""From the name of a model to a directory with config.json, tokenizer.json and weights."""

from __future__ import annotations

import os
from pathlib import Path

from deepinfer.env import read_environment

BUNDLED = Path(__file__).resolve().parents[2] / "models"  # repository root / models
DEFAULT_MODEL = "nano"
DESCRIPTION_FILES = ["config.json", "tokenizer.json", "tokenizer_config.json"]
HUB_FILES = ["*.json", "*.safetensors"]  # what this engine reads; no code, no pickled weights


class ModelNotFoundError(ValueError):
    """A model name that leads to no usable directory. The message says what to try."""


def resolve_model(
    name: str | None = None, *, default_dir: str | Path | None = None, describe_only: bool = False
) -> Path:
    """The directory of a model.

    name: "nano" (bundled; a local directory of that name is `./nano`), a local directory, or a hub id `owner/name`.
    None means the default: `default_dir`, else the variable DEEPINFER_HF_MODEL_DIR, else "nano". A hub id is taken from
    the local cache where it is complete; otherwise it is downloaded, unless HF_HUB_OFFLINE is set. Weights are not
    opened here. Raises ModelNotFoundError.
    """
    origin = ""
    if name is None:
        variable = read_environment().hf_model_dir
        if default_dir is not None:
            name = str(default_dir)
        elif variable is not None:
            name, origin = variable, " (from DEEPINFER_HF_MODEL_DIR)"
        else:
            name = DEFAULT_MODEL
    if not name.strip():
        raise ModelNotFoundError("the model name is empty; give `nano`, a directory or a hub id `owner/name`")
    if name == DEFAULT_MODEL:
        bundled = BUNDLED / DEFAULT_MODEL
        if not bundled.is_dir():
            raise ModelNotFoundError(
                f"the bundled model is missing at {bundled}; clone the repository with its models/ folder, set "
                "DEEPINFER_HF_MODEL_DIR, or write a random one with `deepinfer make-checkpoint DIR --preset tiny`"
            )
        return check_directory(bundled, DEFAULT_MODEL, tokenizer=not describe_only)
    path = Path(name).expanduser()
    if path.exists():
        return check_directory(path, f"{name}{origin}", tokenizer=not describe_only)
    if origin or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelNotFoundError(
            f"{name}{origin}: no such directory, and no hub id of the form `owner/name`; "
            "give `nano`, an existing directory, or a hub id"
        )
    files = DESCRIPTION_FILES if describe_only else HUB_FILES
    return check_directory(_from_hub(name, files), name, tokenizer=not describe_only)


def check_directory(path: Path, shown: str, *, tokenizer: bool = True) -> Path:
    """`path` if it is a readable directory with config.json (and tokenizer.json); raises ModelNotFoundError "
    "otherwise."""
    if not path.is_dir():
        raise ModelNotFoundError(f"{shown} is a file; give the directory that holds config.json")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ModelNotFoundError(f"{shown}: no permission to read the directory; check its owner and mode")
    wanted = ("config.json", "tokenizer.json") if tokenizer else ("config.json",)
    missing = [file for file in wanted if not (path / file).is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{shown} holds no {' and no '.join(missing)}; a model directory has config.json, tokenizer.json and "
            "safetensors weights, as downloaded from the hub"
        )
    unreadable = [file for file in wanted if not os.access(path / file, os.R_OK)]
    if unreadable:
        raise ModelNotFoundError(f"{shown}: no permission to read {' and '.join(unreadable)}; check owner and mode")
    return path


def _from_hub(name: str, files: list[str]) -> Path:
    """The snapshot directory of a hub id: local cache first, then the network unless HF_HUB_OFFLINE forbids it."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{name} is neither a directory nor a hub id: {error}") from None
    except LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ModelNotFoundError(
            f"{name} is not in the local cache ({constants.HF_HUB_CACHE}) and {reason}; download it on a "
            f"connected machine with `hf download {name}` and give the directory as --model"
        ) from None
    except HfHubHTTPError as error:
        raise ModelNotFoundError(
            f"{name} cannot be downloaded: {error}; check the spelling, and log in with `hf auth login` if it is gated"
        ) from None
    except OSError as error:
        raise ModelNotFoundError(
            f"{name} cannot be downloaded: {error}; check the network and the free disk space, or give a "
            "local directory"
        ) from None
