"""Bytes of a model's weights, from its files or, without them, from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"


def weight_bytes(model: Any) -> tuple[int | None, str]:
    """Bytes of a model's weights, of all ranks together.

    Args:
        model: vLLM's ``ModelConfig``.

    Returns:
        The bytes, None if they can't be told, and a few words that say where the number is from.
    """
    folder = Path(str(model.model))
    if folder.is_dir() and (found := sum(file.stat().st_size for file in _files(folder))):
        return int(found * _scale(model)), "from the size of its files"
    if (indexed := _indexed(model)) is not None:
        return int(indexed * _scale(model)), "from its index"
    if (counted := _counted(model)) is not None:
        return counted, "counted from its configuration"
    return None, "its files are not here, and its configuration does not tell"


def _scale(model: Any) -> float:
    """How much larger weights get where vLLM converts them to the dtype that it computes in."""
    stored: Any = getattr(model.hf_config, "dtype", None)
    if model.quantization is not None or not hasattr(stored, "itemsize"):
        return 1.0
    return float(model.dtype.itemsize / stored.itemsize)


def _files(folder: Path) -> list[Path]:
    # Mistral's format has a copy of the same weights beside.
    shards = [*folder.glob("model*.safetensors")]
    return shards or [*folder.glob("*.safetensors")]


def _indexed(model: Any) -> int | None:
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    try:
        index = get_hf_file_to_dict(INDEX, model.model, model.revision)
        return int(index["metadata"]["total_size"]) if index else None
    except Exception:  # No network, no such file, no such repository, or an index without sizes.
        return None


def _counted(model: Any) -> int | None:
    """Bytes of the parameters that transformers would make, none of which are allocated."""
    if model.quantization is not None:
        return None
    try:
        import torch
        import transformers

        architecture = getattr(transformers, model.architectures[0])
        with torch.device("meta"):
            made = architecture._from_config(model.hf_config)
        numel = sum(each.numel() for each in made.parameters())
        return int(numel * model.dtype.itemsize)
    except Exception:  # A model that transformers does not have, or not in this form.
        return None
