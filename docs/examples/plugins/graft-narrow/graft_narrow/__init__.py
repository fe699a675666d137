"""graft-narrow: a tree policy for vllm-graft.

Keep this module free of torch and vLLM: it is imported in vLLM's frontend as well.
"""

from vllm_graft.api import entries, hookimpl


@hookimpl
def graft_tree_policies() -> list[entries.TreePolicy]:
    """Offer the policy, by the name that `graft.tree.policy` chooses it by."""
    load = "graft_narrow.code:narrow"
    return [entries.TreePolicy("graft-narrow", load, "the narrowest tree that holds the nodes")]
