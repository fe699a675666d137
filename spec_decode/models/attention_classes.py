"""Attention layers of classes that no family knows, as far as vLLM's files of a model tell."""

from __future__ import annotations

import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_OWN = re.compile(r"^class (\w*Attention\w*)\([^)]*\bAttentionLayerBase\b", re.MULTILINE)
"""A class of attention that is none of vLLM's own; those of caches beside one have other names."""

_KNOWN = ("MultiHeadLatentAttention",)
"""Classes of this kind that a family of ours claims: Kimi Linear's MLA."""


def own_attention(model: Any) -> str:
    """What a model has of attention classes of its own, as the words after "The target"; empty for
    none, and for classes that are not vLLM's. Files are read, and nothing is imported."""
    text = getattr(model, "hf_text_config", None)
    names = [*(getattr(model, "architectures", None) or ())]
    names += getattr(text, "architectures", None) or ()
    found = [each for name in names for each in _declared(name)]
    return f"has attention layers of a class of its own ({found[0]})" if found else ""


@functools.cache
def _declared(architecture: str) -> tuple[str, ...]:
    """The classes in the file, or the package, of the model that vLLM has for an architecture."""
    from vllm.model_executor.models import ModelRegistry

    module = getattr(ModelRegistry.models.get(architecture), "module_name", "")
    package, _, rest = module.partition(".")
    spec = find_spec("vllm")
    if package != "vllm" or spec is None or not spec.submodule_search_locations:
        return ()
    path = Path(spec.submodule_search_locations[0], *rest.split("."))
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    texts = (file.read_text(encoding="utf-8") for file in files if file.is_file())
    found = {name for text in texts for name in _OWN.findall(text)}
    return tuple(sorted(found.difference(_KNOWN)))
