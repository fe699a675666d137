"""What a worker would refuse once it has loaded the model, as far as the frontend can tell.

A user who asks for trees by name is told by the worker, with the layer's name. A preset must not
stop an engine that would run without us. So it looks here first, and leaves trees off in doubt.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag, target_of
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.chosen import has_model, is_block
from vllm_graft.spec_decode.targets.dense.dense_features import BACKENDS
from vllm_graft.spec_decode.targets.families import served_features
from vllm_graft.spec_decode.targets.features import unserved_in_model
from vllm_graft.spec_decode.targets.latent.latent_features import LATENT_BACKENDS

_SOFT_CAP = "attn_logit_softcapping"
_PROCESSORS = "vllm.logits_processors"


def late_refusals(vllm_config: Any, *, chain: bool = False) -> Iterator[str]:
    """A sentence for each thing that would stop a worker which drafts trees.

    Args:
        vllm_config: a configuration with a draft.
        chain: whether the trees are chains, which the target's own layers verify.
    """
    yield from _draft(vllm_config)
    if not chain:
        yield from _heads(vllm_config)
        yield from _backend(vllm_config)
    yield from _processors()


def _sees_no_tree(vllm_config: Any) -> bool:
    """Whether the draft has no layers that see a tree, so that they may be of any kind."""
    tree = TreeConfig.from_vllm(vllm_config) or TreeConfig()
    speculative = vllm_config.speculative_config
    return is_block(tree, speculative) or not has_model(tree, speculative)


def _draft(vllm_config: Any) -> Iterator[str]:
    model = vllm_config.speculative_config.draft_model_config
    if model is None or _sees_no_tree(vllm_config):
        return
    for _, says in unserved_in_model(model, served_features()):
        yield f"The draft {says}: use another draft, or drop {flag('tree')}."


def _heads(vllm_config: Any) -> Iterator[str]:
    if target_of(vllm_config).use_mla:
        return  # In a cache of latents the sizes of heads don't count.
    text = target_of(vllm_config).hf_text_config
    # Where layers differ (Gemma 4), transformers raises if somebody reads `head_dim` of all.
    if (value := getattr(text, "v_head_dim", None)) is None:
        return
    if value != (key := getattr(text, "head_dim", None)):
        yield (
            f"The target has K and V heads of different sizes ({key} and {value}): serve another "
            f"target, or drop {flag('tree')}."
        )


def _backend(vllm_config: Any) -> Iterator[str]:
    """VLLM chooses a backend when a layer is made; this is how its choice comes out."""
    from vllm.platforms import current_platform

    speculative = vllm_config.speculative_config
    of_draft = getattr(speculative.attention_backend, "name", None)
    latent = getattr(speculative.draft_model_config, "use_mla", False)
    known = LATENT_BACKENDS if latent else BACKENDS
    if of_draft is not None and of_draft not in known and not _sees_no_tree(vllm_config):
        where = "with speculative_config.attention_backend"
        yield _latent_draft(where) if latent else _other(where)
    cache = getattr(getattr(vllm_config, "cache_config", None), "cache_dtype", "auto")
    narrow = str(cache).startswith("fp8")
    if current_platform.device_type == "cpu":
        if narrow or getattr(target_of(vllm_config).hf_text_config, _SOFT_CAP, None):
            yield "On a CPU trees have neither K/V in fp8 nor capped attention logits."
    elif vllm_config.attention_config.backend is None and (
        where := _elsewhere(target_of(vllm_config), narrow)
    ):
        yield _other(where, latent=target_of(vllm_config).use_mla)


def _latent_draft(where: str) -> str:
    return (
        f"vLLM may choose an attention backend other than {', '.join(LATENT_BACKENDS)} {where}: "
        "drop the key, or set it to TRITON_MLA."
    )


def _other(where: str, *, latent: bool = False) -> str:
    if latent:
        return (
            f"vLLM may choose an attention backend other than {', '.join(LATENT_BACKENDS)} {where}:"
            " pass --attention-backend TRITON_MLA, and for a draft of plain attention TRITON_ATTN "
            "as speculative_config.attention_backend."
        )
    return (
        f"vLLM may choose an attention backend other than {', '.join(BACKENDS)} {where}: pass "
        "--attention-backend FLASH_ATTN or --attention-backend TRITON_ATTN."
    )


def _elsewhere(target: Any, narrow: bool) -> str:
    """Where vLLM may choose a backend that trees don't have; empty if it does not here."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"on the platform {current_platform.device_type}"
    if target.is_mm_prefix_lm:
        return "for a model whose images are read in both directions"
    capability = current_platform.get_device_capability()
    # As in platforms/cuda.py: FlashInfer goes first on 10, and FlashAttention 2 reads no fp8.
    if capability is None or not (capability.major == 10 or (narrow and capability.major != 9)):
        return ""
    found = capability.as_version_str()
    return f"on compute capability {found}{' with K/V in fp8' if narrow else ''}"


def _processors() -> Iterator[str]:
    for point in importlib.metadata.entry_points(group=_PROCESSORS):
        yield (
            f"The logits processor {point.value} may read a chain's history: uninstall its plugin, "
            f"or drop {flag('tree')}."
        )
