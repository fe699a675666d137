"""Grammars of structured outputs follow the paths of trees; drafts are packed for them."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.base.errors import SeamError
from vllm_graft.spec_decode.grammars import tree_grammars as ours
from vllm_graft.spec_decode.grammars.tree_grammars import (
    TOKEN_BITS,
    DraftTree,
    is_packed,
    pack,
    tokens_of,
    unpack,
)

VOCAB = 2048
NODES = 15
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
KINDS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": "(self|None)(\\.[a-z]{1,3})?"},
    "choice": {"choice": ["return", "raise", "self.x"]},
    "grammar": {"grammar": 'root ::= "a" root | "b" | " " root'},
}
CHOICE_RULES = {"grammar": 'root ::= "return" | "raise" | "self.x"'}
"""What the frontend makes of the choice for xgrammar."""
THINKING_ENDS = 40
"""A token that ends the made-up model's reasoning."""


class Reasoner:
    """Stands for a reasoning parser."""

    def __init__(self, tokenizer: Any) -> None:
        pass

    def is_reasoning_end(self, ids: list[int]) -> bool:
        return False

    def is_reasoning_end_streaming(self, ids: list[int], delta: list[int]) -> bool:
        return THINKING_ENDS in delta


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SHIPPED / "target")


@pytest.fixture
def structured_output() -> Iterator[Any]:
    """vLLM's module of structured output, wrapped until the test ends."""
    from vllm.v1 import structured_output

    cls = structured_output.StructuredOutputManager
    names = ("validate_tokens", "grammar_bitmask")
    kept = {name: getattr(cls, name) for name in names}
    for name in names:
        setattr(cls, name, getattr(kept[name], "__wrapped__", kept[name]))
    stock = {name: getattr(cls, name) for name in names}
    ours.follow_trees(structured_output)
    yield SimpleNamespace(Manager=cls, **stock)
    for name in names:
        setattr(cls, name, kept[name])


def make_manager(cls: Any, tokenizer: Any, *, reasons: bool = False) -> Any:
    structures = SimpleNamespace(
        enable_in_reasoning=False, disable_any_whitespace=False, disable_additional_properties=False
    )
    config = SimpleNamespace(
        num_speculative_tokens=NODES,
        speculative_config=SimpleNamespace(num_speculative_tokens=NODES),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        parallel_config=SimpleNamespace(distributed_executor_backend="external_launcher"),
        structured_outputs_config=structures,
        model_config=SimpleNamespace(
            skip_tokenizer_init=True,
            hf_config=SimpleNamespace(model_type="llama"),
            get_vocab_size=lambda: VOCAB,
            is_diffusion=False,
        ),
    )
    manager = cls(config)
    manager.tokenizer = tokenizer
    manager.reasoner_cls = Reasoner if reasons else None
    return manager


def make_request(manager: Any, name: str, kind: str, backend: str) -> Any:
    from vllm.v1.request import Request

    rules = CHOICE_RULES if (kind, backend) == ("choice", "xgrammar") else KINDS[kind]
    structured = StructuredOutputsParams(**rules)
    structured._backend = backend
    params = SamplingParams(structured_outputs=structured)
    params.update_from_generation_config({}, manager.tokenizer.eos_token_id)
    request = Request(name, [3, 4, 5], params, None)
    manager.grammar_init(request)
    assert request.structured_output_request.is_grammar_ready
    return request


def permitted(row: np.ndarray) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


class Oracle:
    """vLLM's own answer to each path of a request's tree, taken for a chain."""

    def __init__(self, stock: Any, manager: Any, request: Any) -> None:
        self.stock, self.manager, self.request = stock, manager, request

    def row(self, path: list[int]) -> np.ndarray | None:
        """The mask behind a path; None if the grammar refuses a token of it."""
        if self.stock.validate_tokens(self.manager, self.request, list(path)) != path:
            return None
        name = self.request.request_id
        rows = self.stock.grammar_bitmask(self.manager, {name: self.request}, [name], {name: path})
        return rows[len(path)].copy()


def grow(oracle: Oracle, draw: random.Random, nodes: int, extra: list[int]) -> DraftTree:
    """A random tree, most of whose tokens its grammar permits."""
    tree = DraftTree([-1], [-1])
    while len(tree.tokens) <= nodes:
        parent = draw.randrange(max(0, len(tree.tokens) - 5), len(tree.tokens))
        row = oracle.row([tree.tokens[node] for node in tree.path(parent)])
        good = permitted(row) if row is not None else []
        chosen = good if good and draw.random() < 0.8 else [*extra, draw.randrange(VOCAB)]
        tree.tokens.append(draw.choice(chosen))
        tree.parents.append(parent)
    return tree


def packed(tree: DraftTree) -> list[int]:
    pairs = zip(tree.tokens[1:], tree.parents[1:], strict=True)
    return [token | (parent + 1) << TOKEN_BITS for token, parent in pairs]


def compare(found: np.ndarray, tree: DraftTree, oracle: Oracle) -> int:
    """Compare the row of each node that can be reached; return how many there are."""
    reached = [True] + [False] * (len(tree.tokens) - 1)
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if node:
            permits = token in permitted(found[parent])
            reached[node] = reached[parent] and permits
        expected = oracle.row([tree.tokens[each] for each in tree.path(node)])
        if reached[node] and expected is not None:
            assert np.array_equal(found[node], expected), node
        elif not reached[node]:
            assert (found[node] == -1).all()
    return sum(reached)


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_node_has_the_mask_of_its_path(
    structured_output: Any, tokenizer: Any, backend: str, kind: str
) -> None:
    if backend == "outlines" and kind == "grammar":
        pytest.skip("outlines has no grammars")
    manager = make_manager(structured_output.Manager, tokenizer)
    request = make_request(manager, "one", kind, backend)
    oracle = Oracle(structured_output, manager, request)
    draw, reached = random.Random(f"{backend} {kind}"), 0
    for _ in range(6):
        tree = grow(oracle, draw, NODES, [tokenizer.eos_token_id])
        drafts = packed(tree)
        assert manager.validate_tokens(request, drafts) == drafts
        found = manager.grammar_bitmask({"one": request}, ["one"], {"one": drafts}).copy()
        assert len(found) == NODES + 1
        reached += compare(found, tree, oracle) - 1
        # The grammar is where it was, and the request goes on.
        step = [draw.choice(permitted(found[0]))]
        assert manager.accept_tokens(request, step)
    assert reached > 15


def test_the_mask_of_the_row_before_is_another(structured_output: Any, tokenizer: Any) -> None:
    """Negative control: taken for a chain, a tree gets other masks."""
    manager = make_manager(structured_output.Manager, tokenizer)
    request = make_request(manager, "one", "json", "xgrammar")
    oracle = Oracle(structured_output, manager, request)
    tree = grow(oracle, random.Random(1), NODES, [])
    chain = DraftTree(tree.tokens, list(range(-1, NODES)))
    found = manager.grammar_bitmask({"one": request}, ["one"], {"one": packed(chain)}).copy()
    with pytest.raises(AssertionError):
        compare(found, tree, oracle)


def test_requests_of_all_kinds_share_a_batch(structured_output: Any, tokenizer: Any) -> None:
    """Whole and cut trees, padding, drafts without parents, and none: rows go to their requests."""
    manager = make_manager(structured_output.Manager, tokenizer)
    names = ["tree", "cut", "padding", "chain", "none", "plain"]
    requests = {name: make_request(manager, name, "regex", "xgrammar") for name in names[:-1]}
    oracle = Oracle(structured_output, manager, requests["tree"])
    tree = grow(oracle, random.Random(2), NODES, [])
    cut = DraftTree(tree.tokens[:8], tree.parents[:8])
    chain = [each for each in permitted(oracle.row([])) if oracle.row([each]) is not None][:1]
    drafts = {
        "tree": packed(tree),
        "cut": packed(cut),
        "padding": [-1] * NODES,
        "chain": chain,
        "plain": [1, 2],
    }
    found = manager.grammar_bitmask(requests, names[:-1], drafts).copy()
    sizes = [len(drafts.get(name, [])) + 1 for name in names[:-1]]
    starts = ours._first_rows(len(found), [drafts.get(name, []) for name in names[:-1]], NODES)
    parts = {
        name: found[start : start + size]
        for name, start, size in zip(names, starts, sizes, strict=False)
    }
    compare(parts["tree"], tree, oracle)
    compare(parts["cut"], cut, oracle)
    root = oracle.row([])
    for part in parts.values():
        assert np.array_equal(part[0], root)
    assert (parts["padding"][1:] == -1).all()
    assert np.array_equal(parts["chain"][1], oracle.row(chain))


def test_rows_of_both_layouts() -> None:
    drafts = [[7] * 3, [], [7] * 2]
    assert ours._first_rows(8, drafts, 5) == [0, 4, 5]
    assert ours._first_rows(18, drafts, 5) == [0, 6, 12]
    with pytest.raises(SeamError, match="9 grammar masks"):
        ours._first_rows(9, drafts, 5)


def test_nodes_that_still_reason_are_not_masked(structured_output: Any, tokenizer: Any) -> None:
    manager = make_manager(structured_output.Manager, tokenizer, reasons=True)
    request = make_request(manager, "one", "regex", "xgrammar")
    oracle = Oracle(structured_output, manager, request)
    draw, masked = random.Random(3), 0
    for _ in range(6):
        tree = grow(oracle, draw, NODES, [THINKING_ENDS] * 8)
        drafts = packed(tree)
        found = manager.grammar_bitmask({"one": request}, ["one"], {"one": drafts}).copy()
        compare(found, tree, oracle)
        masked += sum(len(permitted(row)) < VOCAB for row in found)
    assert masked > 3


def test_tokens_of_plain_requests_lose_their_parents(structured_output: Any) -> None:
    manager = object.__new__(structured_output.Manager)
    plain = SimpleNamespace(use_structured_output=False)
    tree = DraftTree([-1, 5, 6, 7], [-1, 0, 0, 2])
    assert manager.validate_tokens(plain, packed(tree)) == [5, 6, 7]
    assert manager.validate_tokens(plain, [5, 6]) == [5, 6]


TOKENS = torch.tensor([[5, 0, 2**31 - 1, 7], [9, 8, -1, -1]])
PARENTS = torch.tensor([[0, 0, 2, 63], [0, 1, 0, 0]], dtype=torch.int32)


def test_tokens_and_parents_come_back() -> None:
    whole, padded = pack(TOKENS, PARENTS).tolist()
    assert unpack(whole).tokens == [-1, 5, 0, 2**31 - 1, 7]
    assert unpack(whole).parents == [-1, 0, 0, 2, 63]
    assert tokens_of(whole) == TOKENS[0].tolist()
    assert unpack(padded) == ([-1, 9, 8], [-1, 0, 1])
    assert tokens_of(padded) == [9, 8, -1, -1]


def test_a_prefix_is_the_smaller_tree() -> None:
    whole = pack(TOKENS, PARENTS).tolist()[0]
    assert unpack(whole[:2]) == ([-1, 5, 0], [-1, 0, 0])


def test_lists_without_parents_are_told_apart() -> None:
    whole, padded = pack(TOKENS, PARENTS).tolist()
    assert is_packed(whole)
    assert is_packed(padded)
    assert not is_packed([])
    assert not is_packed([-1, -1])
    assert not is_packed([0, 2**32 - 1])


def test_paths_and_children() -> None:
    tree = unpack(pack(TOKENS[:1, :3], PARENTS[:1, :3]).tolist()[0])
    assert tree.children == [[1, 2], [], [3], []]
    assert [tree.path(node) for node in range(4)] == [[], [1], [2], [2, 3]]
