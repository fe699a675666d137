"""Structured output at full tree.

vLLM's manager takes a request's drafts for a chain: it cuts them at the first one that the grammar
refuses behind those before it, and advances the grammar through all of them. Here drafts carry
their parents, where vLLM brings tokens alone, and are kept whole. Each node's mask is that of its
own path. A token's id has 32 bits, so the parent travels in the bits above. Such integers survive
all that vLLM does with lists of tokens: they are cut to a prefix and padded with -1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_graft.base.errors import SeamError
from vllm_graft.seams.wrap import around

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_graft.spec_decode.trees.tree import TreeState


class Gate(NamedTuple):
    """Whether a node's token advances the grammar, and whether the grammar masks what is drawn at
    the node. While a model reasons, neither."""

    feeds: bool
    masks: bool


@dataclass
class NodeMasks:
    """Fills the masks of one request's tree by a walk over it, and leaves the grammar as it was.

    A node that its parent's mask forbids cannot be reached, because the target draws at the parent
    under that mask. So the rows of such a node and of its descendants stay as they are.

    Args:
        grammar: the request's grammar in the root's state.
        request_id: the request's name, which backends use in what they log.
        gates: one for each node, the root included.
        rows: int32 ``[num_nodes + 1, ceil(vocab / 32)]`` on the host. Bit ``t`` of a row is set if
            token ``t`` is permitted. The root's row is filled already, and all other bits are set.
    """

    grammar: StructuredOutputGrammar
    request_id: str
    tree: DraftTree
    gates: Sequence[Gate]
    rows: torch.Tensor

    def fill(self) -> None:
        bits, children = self.rows.numpy(), self.tree.children

        def below(parent: int) -> None:
            for node in children[parent]:
                token = self.tree.tokens[node]
                if not int(bits[parent, token >> 5]) >> (token & 31) & 1:
                    continue
                # After its end a grammar permits everything, and nothing advances it.
                feeds = self.gates[node].feeds and not self.grammar.is_terminated()
                if feeds and not self._advance(parent, token):
                    continue
                self._fill(node)
                below(node)
                if feeds:
                    self.grammar.rollback(1)

        below(0)

    def _advance(self, parent: int, token: int) -> bool:
        # Backends log an error about a token that they do not accept. One that an unmasked row
        # permits may be such a token.
        if not self.gates[parent].masks and not self.grammar.validate_tokens([token]):
            return False
        accepted: bool = self.grammar.accept_tokens(self.request_id, [token])
        return accepted

    def _fill(self, node: int) -> None:
        if not self.gates[node].masks:
            # The model still reasons, as it does at the root.
            self.rows[node] = self.rows[0]
        elif not self.grammar.is_terminated():
            self.grammar.fill_bitmask(self.rows, node)


TOKEN_BITS = 32
_TOKEN = (1 << TOKEN_BITS) - 1


class DraftTree(NamedTuple):
    """A request's tree, on the host: token and parent of each node, parents before children. Node 0
    is the root, with -1 for both: its token is no draft."""

    tokens: list[int]
    parents: list[int]

    @property
    def children(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            found[parent].append(node)
        return found

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`; the root's path is empty."""
        found = []
        while node > 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]


def pack(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Put each draft's parent above its token; padding stays as it was. `tokens`: int64
    ``[num_reqs, n]``, drafts; negative ones are padding. `parents`: int32 ``[num_reqs, n]``, node
    index of each draft's parent; 0 is the root."""
    return tokens.where(tokens < 0, tokens + (parents.long() + 1 << TOKEN_BITS))


def is_packed(drafts: Sequence[int]) -> bool:
    """Whether a list of drafts carries parents; a list of padding does not."""
    return bool(drafts) and drafts[0] > _TOKEN


def tokens_of(packed: Sequence[int]) -> list[int]:
    """The tokens alone; padding stays."""
    return [draft if draft < 0 else draft & _TOKEN for draft in packed]


def unpack(packed: Sequence[int]) -> DraftTree:
    """Read the drafts before the first padding."""
    tree = DraftTree([-1], [-1])
    for draft in packed:
        if draft < 0:
            break
        tree.tokens.append(draft & _TOKEN)
        tree.parents.append((draft >> TOKEN_BITS) - 1)
    return tree


def send_parents(worker: Any) -> None:
    """Let the drafts of a worker, which has loaded its model, carry their parents. VLLM copies
    drafts to the host only in steps with structured output, and so do we."""
    context = worker.model_runner.speculator.context
    if context.shape.topk == 1:
        return  # Chains need no parents: vLLM's own way is right for them.
    tree: TreeState = context.tree

    @around(worker.model_runner.draft_tokens_handler, "set_draft_tokens")
    def then_pack(original: Any, input_batch: InputBatch, draft_tokens: torch.Tensor) -> None:
        if input_batch.has_structured_output_reqs:
            nodes = slice(1, 1 + draft_tokens.shape[1])
            draft_tokens = pack(draft_tokens, tree.parents[input_batch.idx_mapping, nodes])
        original(input_batch, draft_tokens)


def follow_trees(module: ModuleType) -> None:
    """Wrap the class in vLLM's module of structured output. Drafts without parents see nothing."""

    @around(module.StructuredOutputManager, "validate_tokens")
    def keep_trees(original: Any, self: Any, request: Request, spec_tokens: list[int]) -> list[int]:
        if not is_packed(spec_tokens):
            kept: list[int] = original(self, request, spec_tokens)
            return kept
        # The parents stay with the tokens until the masks are filled. Nothing else reads them.
        return spec_tokens if request.use_structured_output else tokens_of(spec_tokens)

    @around(module.StructuredOutputManager, "grammar_bitmask")
    def mask_nodes(
        original: Any,
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


def _first_rows(num_rows: int, drafts: Sequence[Sequence[int]], most: int) -> list[int]:
    """Each request's first row among so many masks: vLLM 0.33 gives each request as many rows as a
    request may have at most, vLLM 0.32 as many as it needs. Raises `SeamError` for other counts."""
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
    structured: Any = request.structured_output_request
    gates = gates_of(tree, lambda path: manager._get_constraint_bounds(request, path))
    rows = torch.from_numpy(masks[: len(tree.tokens)])
    NodeMasks(structured.grammar, request.request_id, tree, gates, rows).fill()


def gates_of(tree: DraftTree, bounds: Callable[[Sequence[int]], tuple[int, int]]) -> list[Gate]:
    """The grammar's work at each node. Of a chain of tokens behind the request's, vLLM's `bounds`
    tell the index of the first that advances the grammar, and the tokens behind which it masks."""
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
