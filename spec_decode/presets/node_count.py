"""``graft.tree.nodes``: the user gives a depth, and vLLM gets the number of nodes.

All that plans for drafts in vLLM reads ``speculative_config.num_speculative_tokens``, after the
platform's ``apply_config_platform_defaults``, which is where we set it. Before that, vLLM uses it
for methods that trees don't have, for a check of LoRA, and to see whether it is a multiple of the
number of MTP modules: our refusals repeat the one, and refuse more modules than one.
"""

from __future__ import annotations

from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag, with_section
from vllm_graft.spec_decode.config.tree_config import MAX_STEPS, NAME, TreeConfig
from vllm_graft.spec_decode.models.draft_facts import trained_depth


def count_nodes(tree: TreeConfig, vllm_config: Any) -> TreeConfig:
    """Make ``num_speculative_tokens``, a depth, the ``steps``, and set it to ``tree.nodes``; return
    the section. For configurations that vLLM derives from ours this changes nothing again.

    Raises:
        ConfigError: if the depth is out of bounds, or ``steps`` says another one.
    """
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
        f"{flag(NAME, 'nodes')} makes speculative_config.num_speculative_tokens the depth of a "
        f"tree, got {depth}: set it to 1..{MAX_STEPS}."
    )
