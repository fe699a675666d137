"""``graft.tree.fallback``: a chain where the target has layers that no tree can be verified on."""

from __future__ import annotations

from typing import Any

from vllm_graft.base.log import warning_once
from vllm_graft.base.options import flag, target_of, with_section
from vllm_graft.hooks.feature import not_asked_for
from vllm_graft.spec_decode.config.tree_config import NAME, TreeConfig
from vllm_graft.spec_decode.targets.families import FEATURES, served_features, unserved_in_model


def fall_back(tree: TreeConfig, vllm_config: Any) -> TreeConfig:
    """Make the tree a chain if the target needs one, and say so in the log.

    The chain is as long as the tree would have been deep. vLLM calls this again for configurations
    that it derives; the second time nothing changes.

    Args:
        tree: the section.
        vllm_config: has a ``speculative_config``; both are changed.

    Returns:
        The section that is in force.
    """
    model = target_of(vllm_config)
    if tree.fallback == "refuse" or tree.topk == 1 or model is None:
        return tree
    unserved = list(unserved_in_model(model, served_features()))
    if not all(feature.chain for feature, _ in unserved):
        return tree
    words = [says for _, says in unserved]
    words += [
        f"{says} (trees on these are tried with {flag(NAME, feature.asked)} true)"
        for feature, says in not_asked_for(FEATURES, model, tree)
    ]
    if not words:
        return tree
    speculative = vllm_config.speculative_config
    tokens = speculative.num_speculative_tokens
    depth = tokens if tree.nodes is not None else min(tree.steps, tokens)
    chain = {"topk": 1, "steps": depth, "nodes": None}
    with_section(vllm_config, NAME, **chain)
    speculative.num_speculative_tokens = depth
    if ranges := speculative.num_speculative_tokens_per_batch_size:
        speculative.num_speculative_tokens_per_batch_size = [
            (first, last, min(count, depth)) for first, last, count in ranges
        ]
    warning_once(
        f"The target {' and '.join(words)}, so that {flag(NAME)} drafts a "
        f"chain of {depth} tokens, which the target's own attention verifies. Set "
        f"{flag(NAME, 'fallback')} to 'refuse' to stop instead. Sampled requests keep the tokens "
        "of their seeds, and accept less for it than in vLLM's own chain with draft_sample_method "
        f"'probabilistic' and rejection_sample_method 'block': drop {flag(NAME)} for that one."
    )
    return tree.model_copy(update=chain)
