"""Models of `transformers` with random weights, tiny unless sizes are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 512
USUAL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
    "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
"""Values of a configuration, unless others are given."""


def write_random(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "bfloat16",
    edit: Callable[[Any], object] = lambda model: None,
    **sizes: Any,
) -> Path:
    """Write a random causal model; returns ``folder``.

    Args:
        architecture: the class in `transformers`, whose name a page of the docs reads in the call.
        device: draws the weights, each kind of device its own; a GPU draws large ones sooner.
        edit: changes the model before it is saved.
        sizes: of its configuration.
    """
    import torch
    import transformers

    model = getattr(transformers, architecture)
    torch.manual_seed(seed)
    with torch.device(device):
        made = model(model.config_class(**sizes))
    with torch.no_grad():
        edit(made)
    made.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
