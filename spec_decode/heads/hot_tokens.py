"""Tokens that drafts are chosen from: files of hot tokens, and a draft's own vocabulary."""

import json
from pathlib import Path
from typing import Any

import torch

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import warning_once
from vllm_graft.base.values import reason_of, shown

FLAG = "--additional-config.graft.tree.hot_tokens"
_MODEL = "--speculative-config.model"

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def load_hot_tokens(path: str, vocab_size: int) -> torch.Tensor:
    """Read a hot-token file: target token ids int64, sorted, without duplicates. Formats: a JSON
    list (``.json``), one id per line (``.txt``), or a tensor (``.pt``, as SGLang's token maps are
    stored, or the first tensor of a ``.safetensors`` file). Raises `ConfigError` for a missing or
    unreadable file, or an id outside the target's vocabulary."""
    try:
        file = Path(path).expanduser()
        if file.exists() and not file.is_file():
            raise ValueError("it is no file")
        if file.suffix == ".json":
            values = torch.tensor(json.loads(file.read_text()))
        elif file.suffix == ".txt":
            values = torch.tensor([int(word) for word in file.read_text().split()])
        elif file.suffix == ".safetensors":
            from safetensors.torch import load_file

            values = next(iter(load_file(file).values()), torch.empty(0))
        elif file.suffix == ".pt":
            values = torch.as_tensor(torch.load(file, map_location="cpu", weights_only=True))
        else:
            raise ValueError(f"unknown ending {file.suffix!r}; use .json, .txt, .pt, .safetensors")
        if values.numel() and values.dtype not in _INTEGERS:
            raise TypeError(f"its values are {values.dtype}, not integers")
    # Each format has errors of its own (pickle's, safetensors'), with Exception as common base.
    except Exception as error:
        raise ConfigError(f"{FLAG}: can't read {path!r}: {reason_of(error)}") from error
    ids = values.flatten().long().unique()
    if len(ids) == 0 or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        found = "no token" if len(ids) == 0 else f"ids from {int(ids[0])} to {int(ids[-1])}"
        raise ConfigError(
            f"{FLAG}: {path!r} holds {found}, but the target's vocabulary has ids 0 to "
            f"{vocab_size - 1}: make the list with this model's tokenizer"
        )
    return ids


def check_draft_tokens(draft: Any, vocab_size: int, path: str) -> None:
    """Refuse a draft whose ``d2t`` leads out of the target's vocabulary, and warn without one. A
    draft of fewer tokens than the target adds an offset of ``d2t`` to each of its ids. vLLM fills
    it with zeros where the draft's files (from `path`) have none."""
    offsets: torch.Tensor | None = getattr(draft, "draft_id_to_target_id", None)
    if offsets is None or offsets.is_meta:
        return
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        raise ConfigError(
            f"{_MODEL}: d2t of {shown(path)} leads from {len(outside)} of the draft's "
            f"{len(offsets)} tokens out of the target's vocabulary, token {first} to "
            f"{int(ids[first])}, but its ids are 0 to {vocab_size - 1}: use a draft that was made "
            "for this target, whose d2t holds target id minus draft id"
        )
    if len(offsets) < vocab_size and not offsets.any():
        warning_once(
            f"{_MODEL}: {shown(path)} drafts {len(offsets)} of the target's {vocab_size} tokens "
            "and has no d2t, so they are taken for the target's first ones; if they are others, "
            "hardly a draft is accepted"
        )
