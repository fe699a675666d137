"""The policy itself, which is imported only when it was chosen."""

from vllm_graft.api import TreeConfig, TreeShape


def narrow(config: TreeConfig, num_nodes: int) -> TreeShape:
    """Return the narrowest tree with the configured steps that holds so many nodes.

    It is asked once for each number of nodes while the engine is built, in each process, and has to
    answer the same everywhere.
    """
    steps = min(config.steps, num_nodes)
    for topk in range(1, config.topk):
        shape = TreeShape(topk, steps, num_nodes)
        if shape.num_candidates >= num_nodes:
            return shape
    return TreeShape(config.topk, steps, num_nodes)
