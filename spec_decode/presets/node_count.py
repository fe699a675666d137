"""The number of nodes and the depth of trees, where a key, the draft or the target says another.

With ``graft.tree.nodes`` the user gives a depth, and vLLM gets the number of nodes. All that plans
for drafts in vLLM reads ``speculative_config.num_speculative_tokens``, after the platform's
``apply_config_platform_defaults``, which is where we set it. Before that, vLLM uses it for methods
that trees don't have, for a check of LoRA, and to see whether it is a multiple of the number of MTP
modules: our refusals repeat the one, and refuse more modules than one."""

from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import warning_once
from vllm_graft.base.options import flag, target_of, with_section, without_section
from vllm_graft.hooks.feature import not_asked_for
from vllm_graft.spec_decode.config.tree_config import MAX_STEPS, NAME, TreeConfig
from vllm_graft.spec_decode.models.drafts import trained_depth
from vllm_graft.spec_decode.targets.families import FEATURES, served_features, unserved_in_model


def count_nodes(tree: TreeConfig, vllm_config: Any) -> TreeConfig:
    """Make ``num_speculative_tokens``, a depth, the ``steps``, and set it to ``tree.nodes``; return
    the section. For configurations that vLLM derives from ours this changes nothing again. Raises
    `ConfigError` if the depth is out of bounds, or ``steps`` says another one."""
    speculative = vllm_config.speculative_config
    depth = speculative.num_speculative_tokens
    if "steps" not in tree.model_fields_set:
        if problem := wrong_depth(depth):
            raise ConfigError(problem)
        with_section(vllm_config, NAME, steps=depth)
        tree = tree.model_copy(update={"steps": depth})
    elif depth not in (tree.steps, tree.nodes):
        raise ConfigError(
            f"{flag(NAME, 'steps')} is {tree.steps}, but num_speculative_tokens, which beside "
            f"{flag(NAME, 'nodes')} is the depth of a tree, is {depth}: drop the former."
        )
    speculative.num_speculative_tokens = tree.nodes
    return tree


def fill_in_depth(tree: TreeConfig, vllm_config: Any) -> TreeConfig:
    """Make trees as deep as the draft's blocks, unless the user, maybe by ``nodes``, said how deep;
    return the section. A deeper tree costs a block drafter no further pass."""
    depth = trained_depth(vllm_config.speculative_config)
    if depth is None or tree.nodes is not None or "steps" in tree.model_fields_set:
        return tree
    depth = max(1, min(depth, MAX_STEPS))
    with_section(vllm_config, NAME, steps=depth)
    return tree.model_copy(update={"steps": depth})


def wrong_depth(depth: int) -> str:
    """Why a number is no depth of a tree; empty if it is one."""
    if 1 <= depth <= MAX_STEPS:
        return ""
    return (
        "speculative_config.num_speculative_tokens, which beside a preset and "
        f"{flag(NAME, 'nodes')} is the depth of a tree, is {depth}: set it to 1..{MAX_STEPS}."
    )


def fall_back(tree: TreeConfig, vllm_config: Any) -> TreeConfig:
    """Make the tree a chain if the target needs one, and say so in the log; return the section in
    force. The chain is as long as the tree would have been deep; `vllm_config` is changed, too.
    VLLM calls this again for configurations that it derives; the second time nothing changes."""
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


def leave_to_stock(vllm_config: Any) -> int:
    """Take trees out of a configuration by which buffers are sized already; return the length of
    the chains in their place. ``num_speculative_tokens`` stays, and a table has the scheduler ask
    for no more than the chain."""
    tree, speculative = TreeConfig.from_vllm(vllm_config), vllm_config.speculative_config
    assert tree is not None
    depth: int = min(tree.steps, speculative.num_speculative_tokens)
    without_section(vllm_config, NAME)
    most = vllm_config.scheduler_config.max_num_seqs
    speculative.num_speculative_tokens_per_batch_size = [(1, most, depth)]
    return depth
