"""N-grams of presets: beside a draft's levels, and alone where there is no draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.base.decision import Preset
from vllm_graft.base.part import Offer
from vllm_graft.base.refusal import facts
from vllm_graft.base.values import human
from vllm_graft.spec_decode.config.tree_config import NgramConfig, TreeConfig, lengths_of
from vllm_graft.spec_decode.models.drafts import grows_by_levels
from vllm_graft.spec_decode.refusals.engine_refusals import shape_problems
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import has_delta_rule

if TYPE_CHECKING:
    from vllm_graft.spec_decode.trees.text_state import MemoryState

DEPTH, MATCHES = 31, 4
"""Tokens that are copied from a match at most, and matches of a text. Levels take no pass, so that
a tree is as deep as the longest chain that copies pay for."""

ALONE_MIN = 1
"""Tokens of a match at least. Raised, fewer steps have drafts; how often a match of each length
goes on as it did before is learned, so that short ones do no harm."""

_NODES: dict[str, int] = {"auto": 63, "latency": 63, "throughput": 15}

NGRAM_SHARE, ALONE_SHARE = 0.01, 0.02
"""Most of a device's memory that copies of the texts may take, beside a draft and alone, where vLLM
has a copy of its own. K/V of the same tokens take a thousand times as much, but vLLM keeps those of
fewer tokens than requests may have. Alone it is enough for vLLM's 1,024 requests of 131,072 tokens
on 80 GiB."""


def speculative_config(vllm_config: Any) -> Any | str:
    """vLLM's own config of n-grams as drafts for a target without a draft, or why there is none."""
    from vllm.config import SpeculativeConfig

    model = vllm_config.model_config
    if model is None or getattr(model, "runner_type", "generate") != "generate":
        return "The model generates no text."
    if getattr(model, "is_diffusion", False):
        return "The model generates its text by diffusion."
    if has_delta_rule(model):
        return "Nobody measured them on recurrent layers, of which each node costs a state."
    lengths = NgramConfig(min=ALONE_MIN)
    try:
        return SpeculativeConfig(
            method="ngram_gpu",
            num_speculative_tokens=DEPTH,
            prompt_lookup_min=lengths.min,
            prompt_lookup_max=lengths.max,
            target_model_config=model,
            target_parallel_config=vllm_config.parallel_config,
        )
    except ValueError as refused:
        return f"vLLM refuses their configuration: {refused}"


def fitted(preset: Preset, vllm_config: Any) -> Offer | str:
    """Trees of n-grams alone for the speculative config that is there, or why there are none.

    The number of nodes is always chosen while serving: most texts repeat too little for any.
    """
    if reasons := shape_problems(vllm_config):
        return facts(reasons)
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    if (requests := scheduler.max_num_seqs) < 2:
        return (
            f"--max-num-seqs is {requests}, and a table of drafts by batch size with no drafts in "
            "it, for texts that don't repeat, needs 2."
        )
    if why := _no_room(text_bytes_alone(vllm_config), ALONE_SHARE, vllm_config):
        return why
    depth = speculative.num_speculative_tokens
    nodes = min(_NODES[preset], MATCHES * depth)
    if getattr(vllm_config, "lora_config", None) is not None:
        nodes = max(1, min(nodes, scheduler.max_num_batched_tokens // requests - 1))
    tree = TreeConfig(topk=MATCHES, steps=depth, nodes=nodes, shape="auto")
    says = (
        f"trees of up to {nodes} nodes of n-grams, and none where they don't pay: topk {MATCHES}, "
        f"steps {depth}, shape auto, prompt_lookup_min {speculative.prompt_lookup_min}, "
        f"prompt_lookup_max {speculative.prompt_lookup_max}"
    )
    return Offer(tree, says)


def ngram_room(vllm_config: Any) -> NgramConfig | str:
    """The n-grams of a preset's trees, or why there is no room for them: empty for drafts that do
    not grow by levels, beside which nobody measured them. No model is loaded yet."""
    if not grows_by_levels(TreeConfig(), vllm_config.speculative_config):
        return ""
    ngram = NgramConfig()
    return _no_room(text_bytes(ngram, vllm_config), NGRAM_SHARE, vllm_config) or ngram


def _no_room(taken: int, share: float, vllm_config: Any) -> str:
    """Why copies of the texts of so many bytes have no room; empty if they have."""
    from vllm.platforms import current_platform

    memory = current_platform.get_device_total_memory()
    if taken <= share * memory:
        return ""
    return (
        f"Copies of the texts in which n-grams are looked for would take {human(taken)} with "
        f"--max-num-seqs {vllm_config.scheduler_config.max_num_seqs} and --max-model-len "
        f"{vllm_config.model_config.max_model_len}, more than {share:.0%} of the device's "
        f"{human(memory)}: lower one of the two."
    )


def text_bytes(
    ngram: NgramConfig, vllm_config: Any, *, matches: int = 1, memory: MemoryState | None = None
) -> int:
    """Device bytes on each rank of the requests' texts and of what is learned from them, with so
    many matches of each text, beside a memory or without one."""
    import torch

    from vllm_graft.spec_decode.trees.text_state import NgramState

    width = vllm_config.model_config.max_model_len
    return NgramState.allocate(
        ngram.min,
        ngram.max,
        vllm_config.scheduler_config.max_num_seqs,
        width,
        torch.device("meta"),
        matches=matches,
        reference=ngram.room(width),
        memory=memory,
    ).num_bytes


def text_bytes_alone(vllm_config: Any) -> int:
    """The same for n-grams alone, for which vLLM has its own copy of the texts on the device."""
    ngram = lengths_of(TreeConfig(), vllm_config.speculative_config)
    tokens: int = vllm_config.scheduler_config.max_num_seqs * vllm_config.model_config.max_model_len
    return text_bytes(ngram, vllm_config, matches=MATCHES) + 4 * tokens
