"""Masks of a tree's nodes: which tokens a grammar permits behind each node's path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vllm_graft.spec_decode.grammars.packed_drafts import DraftTree

if TYPE_CHECKING:
    import numpy as np
    import torch


class Grammar(Protocol):
    """The state of one request's grammar: the promises of vLLM's ``StructuredOutputGrammar``."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool: ...

    def validate_tokens(self, tokens: list[int]) -> list[int]: ...

    def rollback(self, num_tokens: int) -> None: ...

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None: ...

    def is_terminated(self) -> bool: ...


class Gate(NamedTuple):
    """Whether a node's token advances the grammar, and whether the grammar masks what is drawn at
    the node. While a model reasons, neither."""

    feeds: bool
    masks: bool


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

    def __init__(
        self,
        grammar: Grammar,
        request_id: str,
        tree: DraftTree,
        gates: Sequence[Gate],
        rows: torch.Tensor,
    ) -> None:
        self._grammar = grammar
        self._request_id = request_id
        self._tree = tree
        self._gates = gates
        self._rows = rows
        self._bits: np.ndarray = rows.numpy()
        self._children = tree.children

    def fill(self) -> None:
        self._below(0)

    def _below(self, parent: int) -> None:
        for node in self._children[parent]:
            if not self._permits(parent, self._tree.tokens[node]):
                continue
            # After its end a grammar permits everything, and nothing advances it.
            feeds = self._gates[node].feeds and not self._grammar.is_terminated()
            if feeds and not self._advance(parent, node):
                continue
            self._fill(node)
            self._below(node)
            if feeds:
                self._grammar.rollback(1)

    def _permits(self, node: int, token: int) -> bool:
        return bool(int(self._bits[node, token >> 5]) >> (token & 31) & 1)

    def _advance(self, parent: int, node: int) -> bool:
        token = [self._tree.tokens[node]]
        # Backends log an error about a token that they do not accept. One that an unmasked row
        # permits may be such a token.
        if not self._gates[parent].masks and not self._grammar.validate_tokens(token):
            return False
        return self._grammar.accept_tokens(self._request_id, token)

    def _fill(self, node: int) -> None:
        if not self._gates[node].masks:
            # The model still reasons, as it does at the root.
            self._rows[node] = self._rows[0]
        elif not self._grammar.is_terminated():
            self._grammar.fill_bitmask(self._rows, node)
