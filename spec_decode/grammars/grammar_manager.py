"""VLLM's manager of structured output, taught to follow trees.

It takes a request's drafts for a chain: it cuts them at the first one that the grammar refuses
behind those before it, and advances the grammar through all of them. Drafts that carry their
parents (`packed_drafts`) are kept whole instead, and each node's mask is that of its own path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import SeamError
from vllm_graft.seams.wrap import wrap
from vllm_graft.spec_decode.grammars.node_masks import Gate, NodeMasks
from vllm_graft.spec_decode.grammars.packed_drafts import DraftTree, is_packed, tokens_of, unpack

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.request import Request


def follow_trees(module: ModuleType) -> None:
    """Wrap the class in vLLM's module of structured output. Drafts without parents see nothing."""
    wrap(module.StructuredOutputManager, "validate_tokens", _then_keep_trees)
    wrap(module.StructuredOutputManager, "grammar_bitmask", _then_mask_nodes)


def _then_keep_trees(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def validate_tokens(self: Any, request: Request, spec_tokens: list[int]) -> list[int]:
        if not is_packed(spec_tokens):
            return original(self, request, spec_tokens)
        # The parents stay with the tokens until the masks are filled. Nothing else reads them.
        return spec_tokens if request.use_structured_output else tokens_of(spec_tokens)

    return validate_tokens


def _then_mask_nodes(original: Callable[..., Any]) -> Callable[..., Any]:
    def grammar_bitmask(
        self: Any,
        requests: dict[str, Request],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> np.ndarray | None:
        names, scheduled = structured_output_request_ids, scheduled_spec_decode_tokens
        drafts = [scheduled.get(name, []) for name in names]
        trees = {name: each for name, each in zip(names, drafts, strict=True) if is_packed(each)}
        # Of a request whose drafts are padding, vLLM masks the root's row and sets all other bits.
        padded = {name: [-1] * len(each) for name, each in trees.items()}
        masks: np.ndarray | None = original(self, requests, names, {**scheduled, **padded})
        if masks is None or not trees:
            return masks
        first_rows = _first_rows(len(masks), drafts, self.vllm_config.num_speculative_tokens)
        for name, first in zip(names, first_rows, strict=True):
            if name in trees:
                _mask_nodes(self, requests[name], unpack(trees[name]), masks[first:])
        return masks

    return grammar_bitmask


def _first_rows(num_rows: int, drafts: Sequence[Sequence[int]], most: int) -> list[int]:
    """Each request's first row among so many masks: vLLM 0.33 gives each request as many rows as a
    request may have at most, vLLM 0.32 as many as it needs.

    Raises:
        SeamError: if there are as many rows in neither version.
    """
    widths = [1 + len(each) for each in drafts]
    if num_rows == len(drafts) * (1 + most):
        widths = [1 + most] * len(drafts)
    elif num_rows != sum(widths):
        raise SeamError(
            f"vLLM made {num_rows} grammar masks for requests of {widths} rows, each of {1 + most} "
            "at most, so vllm-graft can't tell whose they are: remove the keys of "
            "--additional-config.graft.tree, and report this with vLLM's version"
        )
    return [sum(widths[:place]) for place in range(len(widths))]


def _mask_nodes(manager: Any, request: Request, tree: DraftTree, masks: np.ndarray) -> None:
    # Not above: `register()` imports this module where nobody needs torch.
    import torch

    structured: Any = request.structured_output_request
    gates = gates_of(tree, lambda path: manager._get_constraint_bounds(request, path))
    rows = torch.from_numpy(masks[: len(tree.tokens)])
    NodeMasks(structured.grammar, request.request_id, tree, gates, rows).fill()


def gates_of(tree: DraftTree, bounds: Callable[[Sequence[int]], tuple[int, int]]) -> list[Gate]:
    """The grammar's work at each node. Of a chain of tokens behind the request's, vLLM's `bounds`
    tell the index of the first that advances the grammar, and the number of tokens behind which the
    grammar masks."""
    if bounds([])[1] == 0:
        return [Gate(feeds=True, masks=True)] * len(tree.tokens)
    gates = [Gate(feeds=False, masks=False)] * len(tree.tokens)
    for leaf, children in enumerate(tree.children):
        if children or leaf == 0:
            continue
        path = tree.path(leaf)
        first_fed, first_masked = bounds([tree.tokens[node] for node in path])
        for depth, node in enumerate(path, 1):
            gates[node] = Gate(feeds=depth > first_fed, masks=depth >= first_masked)
    return gates
