"""Combinations with trees that are refused in the frontend, before any GPU work, because vLLM
assumes that drafts form a chain, and we do not (yet) undo the assumption."""

import importlib.metadata
from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Find, Found, Refusal, Refusals
from vllm_graft.hooks.feature import Feature
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.drafts import has_model, is_block
from vllm_graft.spec_decode.refusals.draft_refusals import DRAFTS
from vllm_graft.spec_decode.refusals.engine_refusals import ENGINE
from vllm_graft.spec_decode.refusals.fit_refusals import CRASHES, DRIFTS
from vllm_graft.spec_decode.refusals.lookup_refusals import LOOKUPS
from vllm_graft.spec_decode.refusals.verification_refusals import (
    DENSE_BACKEND,
    LATENT_BACKEND,
    VERIFICATION,
)
from vllm_graft.spec_decode.targets.dense.dense_features import BACKENDS
from vllm_graft.spec_decode.targets.families import (
    FEATURES,
    family_refusals,
    served_features,
    unserved_in_model,
)
from vllm_graft.spec_decode.targets.latent.latent_features import LATENT_BACKENDS


def _instead(feature: Feature) -> str:
    remedy = "serve another target"
    if feature.chain:
        remedy = f"set `{flag('tree', 'topk')}` to 1 for a chain"
    return ", or ".join([remedy, *filter(None, [feature.or_else]), f"drop `{flag('tree')}`"])


def _of_target(feature: Feature) -> Find:
    def find(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
        model = target_of(vllm_config)
        if model is None or (feature.chain and tree.topk == 1):
            return
        if says := feature.in_model(model):
            yield f"The target {says}"

    return find


def refusals() -> tuple[Refusal, ...]:
    """Every refusal, without the features of targets that some family serves."""
    served = served_features()
    targets = (
        Refusal(f"targets with {feature.name}", feature.why, _instead(feature), _of_target(feature))
        for feature in FEATURES
        if feature.name not in served
    )
    return (
        *CRASHES, *DRIFTS, *DRAFTS, *LOOKUPS, *ENGINE, *family_refusals(), *targets, *VERIFICATION,
    )  # fmt: skip


_SOFT_CAP = "attn_logit_softcapping"
_PROCESSORS = "vllm.logits_processors"
_OF_DRAFT = "speculative_config.attention_backend"
_DROP = f"drop `{flag('tree')}`"

LATE = Refusals()
"""Refusals of a worker that has loaded the model, as far as the frontend can tell them. A preset
must not stop an engine that would run without us: it looks here first, and leaves trees off in
doubt. Of chains (``topk`` 1), which the target verifies itself, only the draft is looked at."""


def _sees_no_tree(tree: TreeConfig, vllm_config: Any) -> bool:
    """Whether the draft has no layers that see a tree, so that they may be of any kind."""
    speculative = vllm_config.speculative_config
    return is_block(tree, speculative) or not has_model(tree, speculative)


@LATE.row(
    "drafts with layers that no family serves",
    "The levels of a tree run over the draft's own layers.",
    f"use another draft, or {_DROP}",
)
def _draft(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    model = vllm_config.speculative_config.draft_model_config
    if model is not None and not _sees_no_tree(tree, vllm_config):
        for _, says in unserved_in_model(model, served_features()):
            yield f"The draft {says}"


@LATE.row(
    "targets with K and V heads of different sizes",
    "The tree kernel reads K and V as halves of one row.",
    f"serve another target, or {_DROP}",
)
def _heads(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if tree.topk == 1 or target_of(vllm_config).use_mla:
        return  # In a cache of latents the sizes of heads don't count.
    text = target_of(vllm_config).hf_text_config
    # Where layers differ (Gemma 4), transformers raises if somebody reads `head_dim` of all.
    if (value := getattr(text, "v_head_dim", None)) is None:
        return
    if value != (key := getattr(text, "head_dim", None)):
        yield f"The target has K and V heads of different sizes ({key} and {value})"


_LAYOUT = "The tree kernels read the K/V of some backends alone."


@LATE.row("another backend of the draft", _LAYOUT, f"drop `{_OF_DRAFT}`")
def _backend_of_draft(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    speculative = vllm_config.speculative_config
    name = getattr(speculative.attention_backend, "name", None)
    latent = getattr(speculative.draft_model_config, "use_mla", False)
    known, use = (LATENT_BACKENDS, "TRITON_MLA") if latent else (BACKENDS, "TRITON_ATTN")
    if tree.topk > 1 and name not in (None, *known) and not _sees_no_tree(tree, vllm_config):
        yield Found(
            f"{_OF_DRAFT} is {name}, which is none of {', '.join(known)}",
            f"drop {_OF_DRAFT}, or set it to {use}",
        )


@LATE.row(
    "K/V in fp8 and capped attention logits on a CPU",
    "The tree attention of CPUs has neither K/V in fp8 nor capped logits.",
    _DROP,
)
def _on_cpu(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    from vllm.platforms import current_platform

    if tree.topk == 1 or current_platform.device_type != "cpu":
        return
    if _narrow(vllm_config):
        yield "--kv-cache-dtype is fp8 on a CPU"
    if cap := getattr(target_of(vllm_config).hf_text_config, _SOFT_CAP, None):
        yield f"The target caps its attention logits at {cap}"


@LATE.row("a choice of vLLM's among backends", _LAYOUT, DENSE_BACKEND)
def _backend(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    """VLLM chooses a backend when a layer is made; this is how its choice comes out."""
    from vllm.platforms import current_platform

    if tree.topk == 1 or current_platform.device_type == "cpu":
        return
    target = target_of(vllm_config)
    where = _elsewhere(target, _narrow(vllm_config))
    if vllm_config.attention_config.backend is None and where:
        known = LATENT_BACKENDS if target.use_mla else BACKENDS
        use = f"{LATENT_BACKEND}, and for a draft of plain attention `{_OF_DRAFT}` TRITON_ATTN"
        yield Found(
            f"vLLM may choose an attention backend other than {', '.join(known)} {where}",
            (use if target.use_mla else DENSE_BACKEND).replace("`", ""),
        )


def _narrow(vllm_config: Any) -> bool:
    cache = getattr(getattr(vllm_config, "cache_config", None), "cache_dtype", "auto")
    return str(cache).startswith("fp8")


def _elsewhere(target: Any, narrow: bool) -> str:
    """Where vLLM may choose a backend that trees don't have; empty if not here."""
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


@LATE.row(
    "logits processors of plugins",
    "They may read a chain's history.",
    f"uninstall their plugins, or {_DROP}",
)
def _processors(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    for point in importlib.metadata.entry_points(group=_PROCESSORS):
        yield f"A plugin brings the logits processor {point.value}"
