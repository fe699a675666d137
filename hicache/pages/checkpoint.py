"""The files of a model that decide its K/V: weights, code and processors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import xxhash

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.config.connector_options import option_flag
from vllm_graft.hicache.pages.weights import checkpoint_fingerprint

PROCESSORS = ("*processor*.json", "tekken.json")
"""Files that say how images, video and sound are prepared. A name may stand for several."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


def weights_of(model: Any, engine: Any) -> str:
    """The identity of a model's weights: the user's, a commit's, or a fingerprint of the files.

    Args:
        model: vLLM's ``ModelConfig``.
        engine: see :class:`vllm_graft.hicache.pages.inputs.Engine`.

    Raises:
        ConfigError: if the weights are not on a local disk, and the user gave no identity.
    """
    if engine.weights:
        return str(engine.weights)
    load_format = engine.loader_of(model).load_format
    if load_format == "dummy":
        return f"dummy {model.seed}"
    try:
        # The files of a commit never change.
        if (commit := _asked_commit(model)) is not None:
            return f"{model.model} {commit}"
        return checkpoint_fingerprint(_place(model), load_format).hex()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{option_flag('weights')}: the weights of {model.model!r} can't be told "
            f"from others ({error}). Give a text that changes whenever they do, such as a revision."
        ) from error


def commit_of(model: Any) -> str | None:
    """The commit of the Hub that a model's files come from; None if it is unknown."""
    if (commit := _asked_commit(model)) is not None:
        return commit
    folder = folder_of(model)
    known = folder is not None and folder.parent.name == "snapshots"
    return folder.name if folder and known and _COMMIT.fullmatch(folder.name) else None


def processor_files(model: Any) -> dict[str, str]:
    """Hashes of the processors' files of a model, by name."""
    return _hashes(model, PROCESSORS)


def code_files(model: Any) -> dict[str, str]:
    """Hashes of the Python files of a model, by name, if they are run."""
    return _hashes(model, ("*.py",)) if getattr(model, "trust_remote_code", False) else {}


def folder_of(model: Any) -> Path | None:
    """The local folder with a model's files; None if there is none, as for one file."""
    try:
        place = _place(model)
    except (OSError, ValueError):
        return None
    return place if place.is_dir() else None


def _hashes(model: Any, names: tuple[str, ...]) -> dict[str, str]:
    folder = folder_of(model)
    if folder is None:
        return {}
    found = sorted({file for name in names for file in folder.glob(name) if file.is_file()})
    return {file.name: xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in found}


def file_hash(place: str | None) -> str | None:
    """The hash of a file's content; None if there is no such file."""
    if place is None or not (file := Path(place)).is_file():
        return None
    return xxhash.xxh3_128_hexdigest(file.read_bytes())


def _asked_commit(model: Any) -> str | None:
    """The commit that a model on the Hub was asked for at; None for other models."""
    commit = getattr(model.revision, "resolved", None) or model.revision
    wanted = commit is not None and _COMMIT.fullmatch(commit) and not Path(model.model).exists()
    return commit if wanted else None


def _place(model: Any) -> Path:
    """The local file or folder of a model, which may be a snapshot in the Hugging Face cache.

    Raises:
        OSError: if it cannot be found without the network.
        ValueError: if the model's name is none of the Hub's.
    """
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
