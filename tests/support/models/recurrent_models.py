"""Tiny models, half of whose layers are recurrent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.support.models.random_models import USUAL, VOCABULARY, write_random
from vllm_graft.testing import TinyShape

if TYPE_CHECKING:
    import torch

Edit: TypeAlias = Callable[["dict[str, torch.Tensor]"], object]
"""Changes weights, given by their names."""


def write_qwen3_next(
    folder: Path, *, dtype: str = "float32", edit: Edit | None = None, **sizes: Any
) -> Path:
    """Write a random Qwen3-Next, whose layers have experts, with an MTP module.

    A layer has four experts of the size of a hidden state, and asks for two.

    Args:
        edit: changes the weights before they are saved.
        sizes: of `text_sizes`, and of ``Qwen3NextConfig``.

    Returns:
        ``folder``, which serves as the target and as the draft of ``method: mtp``.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    hidden = sizes.get("hidden", 64)
    experts = {
        "moe_intermediate_size": hidden, "shared_expert_intermediate_size": hidden,
        "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**text_sizes(**experts | sizes)))
    return save_with_module(folder, model, "num_nextn_predict_layers", dtype=dtype, edit=edit)


def text_sizes(
    *,
    heads: tuple[int, int] = (1, 2),
    head: int = 16,
    hidden: int = 64,
    layers: int = 4,
    kinds: tuple[str, ...] = ("linear_attention", "full_attention"),
    **sizes: Any,
) -> dict[str, Any]:
    """Values of the configuration of a text model with the gated delta rule.

    Args:
        heads: heads of keys and of values in recurrent layers.
        head: size of the heads of recurrent layers, 128 in the published models.
        layers: how many there are, a multiple of the number of ``kinds``.
        kinds: kinds of layers, over and over; the last one has full attention, as the module has.
        sizes: other keys of the configuration.
    """
    return {
        "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": hidden // 2,
        "linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1],
        "linear_key_head_dim": head, "linear_value_head_dim": head, "linear_conv_kernel_dim": 4,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
        "initializer_range": 1.2 * hidden**-0.5, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1,
        "layer_types": list(kinds) * (layers // len(kinds)),
    } | sizes  # fmt: skip


def save_with_module(
    folder: Path, model: Any, modules: str, *, dtype: str = "float32", edit: Edit | None = None
) -> Path:
    """Save a random model and an MTP module like its last layer, which has full attention."""
    import torch
    from safetensors.torch import load_file, save_file

    text = model.config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    with torch.no_grad():
        _decay_slowly(model.to(getattr(torch, dtype)))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)[modules] = 1
    (folder / "config.json").write_text(json.dumps(config))
    # A large model has several files.
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    # Beside a vision tower the text model's names begin otherwise.
    inside = "language_model." if "text_config" in config else ""
    last = f"model.{inside}layers.{layers - 1}."
    module = {
        name.replace(last, "mtp.layers.0."): weight.clone()
        for name, weight in weights.items()
        if name.startswith(last)
    }
    norms = ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")
    module |= {f"mtp.{name}.weight": torch.zeros(hidden) for name in norms}
    module["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden) * hidden**-0.5
    weights |= {name: weight.to(getattr(torch, dtype)) for name, weight in module.items()}
    if edit is not None:
        edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_nemotron_h(
    folder: Path, *, heads: int = 2, head: int = 16, state: int = 16, hidden: int = 64
) -> Path:
    """Write a random Nemotron-H: of six layers two have Mamba-2, two attention, two an MLP."""
    sizes = {
        "head_dim": hidden // 2, "mamba_num_heads": heads, "mamba_head_dim": head,
        "ssm_state_size": state, "n_groups": 1, "conv_kernel": 4, "chunk_size": 16,
        "layers_block_type": ["mamba", "mlp", "attention"] * 2, "rescale_prenorm_residual": False,
    }  # fmt: skip
    return _write(folder, "NemotronHForCausalLM", hidden, **sizes)


def write_falcon_h1(
    folder: Path, *, heads: int = 2, head: int = 16, state: int = 16, hidden: int = 64
) -> Path:
    """Write a random Falcon-H1: each of two layers has attention and Mamba-2 side by side."""
    sizes = {
        "num_hidden_layers": 2, "head_dim": hidden // 2, "mamba_d_ssm": heads * head,
        "mamba_n_heads": heads, "mamba_d_head": head, "mamba_n_groups": 1, "mamba_d_state": state,
        "mamba_d_conv": 4, "mamba_chunk_size": 16,
    }  # fmt: skip
    return _write(folder, "FalconH1ForCausalLM", hidden, **sizes)


def write_granite_hybrid(
    folder: Path, *, heads: int = 2, head: int = 64, state: int = 16, hidden: int = 64
) -> Path:
    """Write a random Granite 4.0-H without experts: of four layers two have Mamba-2.

    The arguments are those of :func:`write_nemotron_h`; ``heads * head`` is ``2 * hidden``.
    """
    sizes = {
        "layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4, "mamba_n_heads": heads,
        "mamba_d_head": head, "mamba_n_groups": 1, "mamba_d_state": state, "mamba_d_conv": 4,
        "mamba_chunk_size": 16, "mamba_expand": 2, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 2 * hidden, "position_embedding_type": "rope",
    }  # fmt: skip
    return _write(folder, "GraniteMoeHybridForCausalLM", hidden, **sizes)


def _write(folder: Path, architecture: str, hidden: int, **sizes: Any) -> Path:
    """Write a model with Mamba-2 of these and the usual sizes."""
    usual = {name: value for name, value in USUAL.items() if name != "head_dim"}
    usual |= {"hidden_size": hidden, "intermediate_size": 2 * hidden, "pad_token_id": 2}
    usual |= {"initializer_range": 1.2 * hidden**-0.5, "tie_word_embeddings": False}
    return write_random(folder, architecture, dtype="float32", edit=_decay_slowly, **usual | sizes)


def _decay_slowly(model: Any) -> None:
    """Let states decay slowly: a token depends on those far before it."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(-3.0, 0.0)
        elif name.endswith("conv1d.weight"):
            weight.normal_(std=0.5)


def draft_shape(hidden: int = 64, layers: int = 4) -> TinyShape:
    """The shape of an EAGLE-3 head for the target.

    Its K/V per token are as large as those of a layer of the target, so that vLLM gives both blocks
    of as many tokens: cached prefixes end where blocks of both kinds do.
    """
    return TinyShape(
        vocab_size=VOCABULARY, hidden_size=hidden, num_layers=layers, head_dim=hidden // 2
    )
