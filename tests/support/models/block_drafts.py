"""A tiny target and drafts of blocks of positions that predict it by construction.

A token depends on those 9 and 12 places before it, which two attention heads look up by distance,
and on the last token as much as it is asked to. A draft has the same layer, so that it looks up the
same, and a term for the last token if its kind has one. What a draft lacks, or errs in, shows in
what is accepted of it.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.models.mtp_targets import FAST, SHARP, THETA, look_up
from vllm_graft.testing.models.llama import (
    TINY,
    model_config,
    random_weights,
    write_checkpoint,
    write_tokenizer,
)

SHAPE = replace(TINY, num_layers=1)
"""Of target and drafts: one layer, two heads and a hidden size of 64. Half of that is a token's
embedding, half is what the heads look up."""

DEPTH = 8
"""Most positions of a block that predict a token without an error."""

_DISTANCES = (8, 11)
"""How far each head looks back from the token before the predicted one."""

_LOOKED_UP = 6.0
_RANK = 32


def write_block_target(folder: Path, *, from_last: float = 0.0) -> Path:
    """Write the target, a Qwen2; returns ``folder``.

    ``from_last``: weight of the last token in the logits, beside 1 for the tokens looked up.
    """
    torch, _ = random_weights(0, SHAPE)
    embedding, rows = _tables(from_last)
    layer = _layer(_DISTANCES, torch)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(SHAPE.hidden_size),
        "lm_head.weight": rows,
        **{f"model.layers.0.{name}": each for name, each in layer.items()},
    }
    config = {**_config("Qwen2ForCausalLM"), "model_type": "qwen2"}
    write_checkpoint(folder, weights, config)
    write_tokenizer(folder, SHAPE.vocab_size)
    return folder


def write_dflash(folder: Path, *, error: float = 0.0, causal: bool = False) -> Path:
    """Write a DFlash draft of the target; returns ``folder``.

    Args:
        error: noise in what the draft reads of the target's states; above 0 it errs.
        causal: whether a position sees no later one. TRITON_ATTN has nothing else.
    """
    weights = _draft(error, extra_distance=1)
    _write_draft(folder, weights, "DFlashDraftModel", causal)
    return folder


def write_dflash2(
    folder: Path, *, from_last: float = 0.0, error: float = 0.0, causal: bool = False
) -> Path:
    """Write a DFlash 2 draft, whose scores of pairs know how the last token counts.

    With an error its convolutions mix neighbouring positions, too.
    """
    torch, randn = random_weights(2, SHAPE)
    weights = _draft(error, extra_distance=1)
    embedding, rows = _tables(from_last)
    taps, groups = 2, SHAPE.hidden_size // 16
    for name in ("attention_conv", "mlp_conv"):
        kernel = randn(2, taps, SHAPE.hidden_size) * error
        kernel[:, 0] += 1
        weights[f"layers.0.{name}.base_kernel"] = kernel
        weights[f"layers.0.{name}.kernel_projection.weight"] = torch.zeros(
            2 * taps * groups, SHAPE.hidden_size
        )
    mask = embedding[-1, :_RANK]
    weights |= {
        "lm_head.weight": _blind(rows),
        # The head's states begin with the mask's embedding, which this makes a vector of ones.
        "candidate_selector.hidden_projection.weight": torch.cat(
            [mask.expand(_RANK, -1) / _RANK, torch.zeros(_RANK, _RANK)], 1
        ),
        "candidate_selector.predecessor_codebook": embedding[:, :_RANK].clone(),
        "candidate_selector.successor_codebook": rows[:, :_RANK].clone(),
    }
    sizes = {"conv_kernel_size": taps, "conv_group_size": 16, "selector_rank": _RANK}
    sizes["selector_top_k"] = 6
    _write_draft(folder, weights, "DFlash2DraftModel", causal, sizes)
    return folder


def write_lilicorr(folder: Path) -> Path:
    """Write a LiLiCorr draft, whose attention between candidates is random, so that it errs."""
    torch, randn = random_weights(3, SHAPE)
    weights = _draft(0.0, extra_distance=1)
    hidden, heads, factors, features, top_k = SHAPE.hidden_size, 2, 8, 5, 4
    linear = {
        "pass_hidden_proj": (hidden, hidden),
        "context_proj": (hidden, hidden),
        "feature_mlp.up_proj": (hidden, features),
        "feature_mlp.down_proj": (hidden, hidden),
        "layers.0.attn.out_proj": (hidden, hidden),
        "layers.0.mlp.up_proj": (2 * hidden, hidden),
        "layers.0.mlp.down_proj": (hidden, 2 * hidden),
        "factor_input_proj": (hidden, 3 * hidden),
        "out_head": (factors, hidden),
        "in_head": (factors, hidden),
        "anchor_out_head": (factors, hidden),
    }
    head = {f"{name}.weight": randn(*size) * 2 for name, size in linear.items()}
    head |= {f"{name}.bias": torch.zeros(size[0]) for name, size in linear.items()}
    norms = {"feature_norm": features} | dict.fromkeys(
        ("output_norm", "anchor_norm", "layers.0.attn_norm", "layers.0.mlp_norm"), hidden
    )
    head |= {f"{name}.weight": torch.ones(size) for name, size in norms.items()}
    head |= {
        "feature_norm.bias": torch.zeros(features),
        "layers.0.attn.in_proj_weight": randn(3 * hidden, hidden) * 2,
        "layers.0.attn.in_proj_bias": torch.zeros(3 * hidden),
        "slot_embedding": randn(1, 1, DEPTH, 1, hidden),
        "rank_embedding": randn(1, 1, 1, top_k, hidden) * 20,
        "relative_slot_bias": randn(heads, 2 * DEPTH + 1),
        "same_slot_bias": randn(heads),
    }
    weights |= {f"lilicorr.{name}": each for name, each in head.items()}
    sizes: dict[str, Any] = {
        "lilicorr_hidden_size": hidden,
        "lilicorr_num_layers": 1,
        "lilicorr_num_heads": heads,
        "lilicorr_mlp_ratio": 2,
        "lilicorr_factor_dim": factors,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 4.0,
        "lilicorr_candidate_topk": top_k,
    }
    _write_draft(folder, weights, "LiLiCorrDraftModel", False, sizes)
    return folder


def write_dspark(
    folder: Path,
    *,
    from_last: float = 0.0,
    error: float = 0.0,
    causal: bool = False,
    from_anchor: bool = True,
) -> Path:
    """Write a DSpark draft, whose bias by the last token is the target's.

    ``from_anchor``: the last token's position predicts the next token, not a mask behind it.
    """
    embedding, rows = _tables(from_last)
    weights = _draft(error, extra_distance=0 if from_anchor else 1)
    weights |= {
        "lm_head.weight": _blind(rows),
        "markov_head.markov_w1.weight": embedding[:, :_RANK].clone(),
        "markov_head.markov_w2.weight": rows[:, :_RANK].clone(),
    }
    more = {"markov_rank": _RANK, "sample_from_anchor": from_anchor}
    if from_anchor:
        more["block_size"] = DEPTH
    _write_draft(folder, weights, "Qwen3DSparkModel", causal, top_level=more)
    return folder


def write_xpress(
    folder: Path,
    *,
    from_last: float = 0.0,
    error: float = 0.0,
    causal: bool = False,
    topc: int = 0,
    passes: int = DEPTH,
) -> Path:
    """Write an XPress draft, whose refiner knows how the last token counts. VLLM 0.33 serves it.

    With an error the refiner's bias depends on all tokens of a path and on the block's states.
    ``topc``: candidates of a position, 0 for all; ``passes``: those of vLLM's chain.
    """
    torch, randn = random_weights(4, SHAPE)
    embedding, rows = _tables(from_last)
    weights = _draft(error, extra_distance=1)
    hidden, inner, width = SHAPE.hidden_size, 2 * _RANK, DEPTH + 1
    head = {
        "w1.weight": embedding[:, :_RANK].clone(),
        "down_h.weight": randn(_RANK, hidden) * error,
        "down_g.weight": randn(_RANK, hidden) * error,
        "in_proj.weight": torch.cat([randn(_RANK, 2 * _RANK), torch.eye(_RANK)], 1),
        "mix.L": randn(_RANK, width, width) * error,
        "mlp.gate_proj.weight": randn(inner, _RANK),
        "mlp.up_proj.weight": randn(inner, _RANK),
        "mlp.down_proj.weight": randn(_RANK, inner) * error,
        "w2.weight": rows[:, :_RANK].clone(),
    }
    weights |= {"lm_head.weight": _blind(rows)}
    weights |= {f"xpress_head.{name}": each for name, each in head.items()}
    more = {
        "xpress_block_size": width,
        "xpress_rank": _RANK,
        "xpress_mlp_hidden": inner,
        "xpress_num_passes": passes,
        "xpress_topc": topc,
        "xpress_compile_head": False,
    }
    _write_draft(folder, weights, "Qwen3XPressModel", causal, top_level=more)
    return folder


def _tables(from_last: float) -> tuple[Any, Any]:
    """Embeddings and output head; all embeddings have the same length, so that norms don't vary."""
    import torch

    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (SHAPE.vocab_size, _RANK), generator=generator) * 2.0 - 1
    embedding = torch.cat([signs, torch.zeros_like(signs)], 1)
    rows = torch.randn(SHAPE.vocab_size, 2 * _RANK, generator=generator) / math.sqrt(_RANK)
    rows *= _LOOKED_UP / 2
    rows[:, :_RANK] *= from_last
    return embedding, rows


def _blind(rows: Any) -> Any:
    """An output head without what the target's reads of the last token, for a term of its own."""
    blind = rows.clone()
    blind[:, :_RANK] = 0
    return blind


def _layer(distances: tuple[int, ...], torch: Any) -> dict[str, Any]:
    """A layer whose heads look up the tokens at two distances, and that does nothing else."""
    hidden, inner, size = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.head_dim
    half = size // 2
    queries, key = look_up(SHAPE, distances, size)
    # The norm before makes a token's embedding longer by this factor.
    value = torch.cat([torch.eye(_RANK), torch.zeros(_RANK, _RANK)], 1) / math.sqrt(2)
    output = torch.zeros(hidden, 2 * size)
    # One half of what each head finds: the state behind the layer has the same length for all.
    output[_RANK : _RANK + half, :half] = torch.eye(half)
    output[_RANK + half :, size + half :] = torch.eye(half)
    return {
        "input_layernorm.weight": torch.ones(hidden),
        "post_attention_layernorm.weight": torch.ones(hidden),
        "self_attn.q_proj.weight": torch.zeros(2 * size, hidden),
        "self_attn.q_proj.bias": queries.flatten(),
        "self_attn.k_proj.weight": torch.zeros(size, hidden),
        "self_attn.k_proj.bias": key,
        "self_attn.v_proj.weight": value,
        "self_attn.v_proj.bias": torch.zeros(size),
        "self_attn.o_proj.weight": output,
        "mlp.gate_proj.weight": torch.zeros(inner, hidden),
        "mlp.up_proj.weight": torch.zeros(inner, hidden),
        "mlp.down_proj.weight": torch.zeros(hidden, inner),
    }


def _draft(error: float, *, extra_distance: int) -> dict[str, Any]:
    """The target's layer with norms of queries and keys, and what reads the target's states."""
    torch, randn = random_weights(1, SHAPE)
    near, far = _DISTANCES
    layer = _layer((near + extra_distance, far + extra_distance), torch)
    # Queries and keys are constant, so that their norms can be given back to them.
    rms = math.sqrt(FAST / SHAPE.head_dim)
    key = SHARP * math.sqrt(SHAPE.head_dim) * rms
    layer |= {
        "self_attn.q_norm.weight": torch.full((SHAPE.head_dim,), rms),
        "self_attn.k_norm.weight": torch.full((SHAPE.head_dim,), key),
        "self_attn.o_proj.bias": torch.zeros(SHAPE.hidden_size),
    }
    noise = randn(SHAPE.hidden_size, SHAPE.hidden_size) * error
    return {
        "fc.weight": torch.eye(SHAPE.hidden_size) + noise,
        "hidden_norm.weight": torch.ones(SHAPE.hidden_size),
        "norm.weight": torch.ones(SHAPE.hidden_size),
        **{f"layers.0.{name}": each for name, each in layer.items()},
    }


def _config(architecture: str) -> dict[str, Any]:
    return {
        **model_config(SHAPE, SHAPE.num_layers, architecture),
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    }


def _write_draft(
    folder: Path,
    weights: dict[str, Any],
    architecture: str,
    causal: bool,
    sizes: dict[str, Any] | None = None,
    top_level: dict[str, Any] | None = None,
) -> None:
    config = {
        **_config(architecture),
        "model_type": "qwen3",
        "attention_bias": True,
        "block_size": DEPTH + 1,
        **(top_level or {}),
    }
    config["dflash_config"] = {
        # An id that texts hardly have, and the states before the target's first layer.
        "mask_token_id": SHAPE.vocab_size - 1,
        "target_layer_ids": [-1],
        "causal": causal,
        **(sizes or {}),
    }
    write_checkpoint(folder, weights, config)
