"""The plain form of a tree step over toy models: its tokens are the target's own draws."""

import math
import sys
from typing import Any

import pytest
import torch

from tests.support.crossed import crossed
from tests.support.processes import finished
from vllm_graft.spec_decode import step as module
from vllm_graft.spec_decode.drafters.draft_trees import Sources
from vllm_graft.spec_decode.kernels.compact import KVCacheTable
from vllm_graft.spec_decode.kernels.verify import walk_tree
from vllm_graft.spec_decode.step import Models, TreeSteps
from vllm_graft.spec_decode.targets.dense.plain_attention import tree_attention_reference
from vllm_graft.spec_decode.trees.batch import TreeBatch
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeShape, num_candidates
from vllm_graft.spec_decode.verification.context import TreeContext

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = TreeShape(topk=3, steps=3, num_nodes=8)
VOCAB, HEADS, HEAD_SIZE, LAYERS, MAX_LEN, BLOCK = 13, 2, 4, 2, 64, 4
WIDTH = HEADS * HEAD_SIZE
PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]
STEPS = 8


class ToyTarget:
    """A small transformer with K/V in pages, and the same one over a whole text at once."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        made = torch.Generator().manual_seed(2)
        self.embed, self.place, self.head = (
            torch.randn(rows, WIDTH, generator=made).to(DEVICE) for rows in (VOCAB, MAX_LEN, VOCAB)
        )
        self.mixes = torch.randn(LAYERS, 3, WIDTH, WIDTH, generator=made).to(DEVICE)
        blocks = len(PROMPTS) * MAX_LEN // BLOCK
        # Pages are in no order.
        pages = torch.randperm(blocks, generator=made).view(len(PROMPTS), -1)
        self.block_table = pages.to(DEVICE, torch.int32)
        size = (blocks, HEADS, BLOCK, 2 * HEAD_SIZE)
        self.caches = [torch.zeros(size, device=DEVICE) for _ in range(LAYERS)]
        self.kv = KVCacheTable.build(self.caches, [0] * LAYERS)

    @property
    def slots(self) -> torch.Tensor:
        first = self.block_table.long()[:, :, None] * BLOCK
        return (first + torch.arange(BLOCK, device=DEVICE)).flatten(1)

    def run(self, batch: Any, context: TreeContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, and as states what a row has read: its token and its position."""
        assert len(batch.slots.unique()) == len(batch.slots)
        states = self.embed[batch.input_ids] + self.place[batch.positions]
        rows, lens = context.rows, batch.query_start_loc.diff()
        assert torch.equal(rows.num_rows[: batch.num_reqs], lens)
        for mix, cache in zip(self.mixes, self.caches, strict=True):
            query, key, value = (states @ mix).view(3, -1, HEADS, HEAD_SIZE)
            cache[batch.slots // BLOCK, :, batch.slots % BLOCK] = torch.cat([key, value], -1)
            found = torch.empty_like(query)
            attention = TreeBatch(
                query, cache, batch.query_start_loc, rows.prefix_lens + lens, rows.prefix_lens,
                self.block_table, rows.row_masks, rows.num_rows, 64, MAX_LEN, 0.5,
            )  # fmt: skip
            tree_attention_reference(attention, found)
            states = states + found.flatten(1)
        return states @ self.head.t(), torch.stack([batch.input_ids, batch.positions], 1).float()

    def next_logits(self, text: tuple[int, ...]) -> torch.Tensor:
        """Return the logits behind a text, float32 ``[vocab]``, computed without any cache."""
        states = self.embed[list(text)] + self.place[: len(text)]
        for mix in self.mixes:
            query, key, value = (states @ mix).view(3, -1, HEADS, HEAD_SIZE).transpose(1, 2)
            logits = query @ key.transpose(1, 2) * 0.5
            future = torch.ones(len(text), len(text), device=DEVICE).triu(1).bool()
            found = logits.masked_fill(future, -math.inf).softmax(-1) @ value
            states = states + found.transpose(0, 1).flatten(1)
        return states[-1] @ self.head.t()

    def noisy(self, logits: torch.Tensor, request: int, position: int) -> torch.Tensor:
        """Add seeded Gumbel noise, whose largest sum is a draw; none at temperature 0."""
        if not self.temperature:
            return logits
        seeded = torch.Generator().manual_seed(1000 * request + position)
        uniform = torch.rand(VOCAB, generator=seeded).clamp(1e-7, 1 - 1e-7).to(DEVICE)
        return logits / self.temperature - uniform.log().neg().log()

    def sample(self, logits: Any, requests: Any, positions: Any) -> torch.Tensor:
        where = zip(logits, requests.tolist(), positions.tolist(), strict=True)
        return torch.stack([self.noisy(*each).argmax() for each in where])

    def alone(self, prompt: list[int], request: int, count: int) -> list[int]:
        """Return the tokens that the target draws without drafts."""
        text = tuple(prompt)
        for _ in range(count):
            drawn = self.noisy(self.next_logits(text), request, len(text) - 1).argmax()
            text = (*text, int(drawn))
        return list(text[len(prompt) :])


class ToyDraft:
    """A draft whose states are texts: request, length, then the tokens.

    `error` is added to the target's own logits: 0 makes a perfect draft. A `wrong` draft shuns the
    token that the target will draw.
    """

    def __init__(self, target: ToyTarget, *, error: float = 0.0, wrong: bool = False) -> None:
        self.target, self.error, self.wrong = target, error, wrong
        self.texts = torch.full((len(PROMPTS), MAX_LEN + 2), -1.0, device=DEVICE)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def extend(self, request: int, ids: Any, positions: Any, states: Any) -> torch.Tensor:
        text = self.texts[request]
        assert torch.equal(states[:, 1], positions.float())
        text[2 + positions], text[3 + positions] = states[:, 0], ids.float()
        text[0], text[1] = request, positions[-1] + 2
        return text.clone()

    def read(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        states = states.clone()
        states[torch.arange(len(states)), 2 + states[:, 1].long()] = tokens.float()
        states[:, 1] += 1
        return states

    def top(self, states: Any, positions: Any, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert torch.equal(states[:, 1], positions + 1.0)
        best = torch.stack([self.scores(*row) for row in states.long().tolist()]).topk(topk)
        return best.values.contiguous(), best.indices.contiguous()

    def scores(self, request: int, length: int, *tokens: int) -> torch.Tensor:
        text = (request, *tokens[:length])
        if text not in self.known:
            logits = self.target.next_logits(text[1:])
            seeded = torch.Generator().manual_seed(sum(text) * 100 + length)
            logits = logits + self.error * torch.randn(VOCAB, generator=seeded).to(DEVICE)
            drawn = self.target.noisy(logits, request, length - 1)
            if self.wrong:
                drawn[drawn.argmax()] = -99.0
            # A sharp distribution: the draft is sure of its best token.
            self.known[text] = (20 * drawn).log_softmax(-1)
        return self.known[text]


class Oracle:
    """Another source: it knows the target's next token behind the first child of each root."""

    def __init__(self, draft: ToyDraft) -> None:
        self.draft = draft

    def columns(self, num_nodes: int) -> int:
        return 1

    def add(
        self, table: CandidateTable, drafter: Any, num_reqs: int, levels: int, *, first: int,
        num_nodes: int,
    ) -> None:  # fmt: skip
        for r in drafter.idx_mapping.tolist():
            text = self.draft.texts[r].long().tolist()
            logits = self.draft.target.next_logits(tuple(text[2 : 2 + text[1]]))
            drawn = self.draft.target.noisy(logits, r, text[1] - 1).argmax()
            table.tokens[r, first], table.parents[r, first] = drawn, -1
            table.scores[r, first] = 0.0


def make_context() -> TreeContext:
    workspace: Any = None  # The toy's attention needs none.
    return TreeContext.allocate(SHAPE, len(PROMPTS), 64, workspace, torch.device(DEVICE))


def make(
    temperature: float, source: Any = None, **draft: Any
) -> tuple[TreeSteps, list[list[int]], ToyTarget, ToyDraft]:
    """Return steps behind the prompts, and the tokens so far."""
    target = ToyTarget(temperature)
    toy = ToyDraft(target, **draft)
    models = Models(toy.extend, toy.read, toy.top, target.run, target.kv, target.sample)
    extras = None if source is None else Sources(source(toy))
    steps = TreeSteps(make_context(), models, target.slots, extras)
    first = steps.begin([torch.tensor(prompt, device=DEVICE) for prompt in PROMPTS])
    return steps, first, target, toy


def emitted(temperature: float, **options: Any) -> tuple[list[list[int]], list[list[int]], float]:
    """Return each request's tokens, the target's own, and the mean acceptance length."""
    steps, tokens, target, _ = make(temperature, **options)
    for _ in range(STEPS):
        for text, new in zip(tokens, steps.step(), strict=True):
            text += new
    alone = [target.alone(PROMPTS[r], r, len(text)) for r, text in enumerate(tokens)]
    length = sum(len(text) - 1 for text in tokens) / STEPS / len(PROMPTS)
    return tokens, alone, length


TEMPERATURES = [0.0, 1.5]


@pytest.mark.parametrize(
    ("temperature", "given"),
    crossed(
        TEMPERATURES,
        [
            ({}, SHAPE.steps + 1, SHAPE.steps + 1),
            ({"error": 8.0}, 2.0, SHAPE.steps + 0.9),
            ({"error": 50.0}, 1.1, 2.5),
            ({"wrong": True}, 1.0, 1.0),
        ],
    ),
)
def test_tokens_are_the_target_s_own(
    temperature: float, given: tuple[dict[str, Any], float, float]
) -> None:
    draft, least, most = given
    tokens, alone, length = emitted(temperature, **draft)
    assert tokens == alone
    assert least <= length <= most


def test_another_source_joins_the_candidates() -> None:
    tokens, alone, length = emitted(0.0, wrong=True, source=Oracle)
    assert tokens == alone
    assert length == 2.0
    steps, *_ = make(0.0, wrong=True, source=Oracle)
    assert steps.table.scores.shape[1] == num_candidates(SHAPE.topk, SHAPE.steps) + 1


def test_a_walk_to_another_child_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This negative control takes each child of a root for its sibling."""

    def walk(drawn: Any, drafts: Any, cu_num_logits: Any, idx: Any, tree: Any, *out: Any) -> None:
        if len(drafts) > len(PROMPTS):
            rows = drafts.view(len(PROMPTS), -1)
            for row, parents in zip(rows, tree.parents, strict=True):
                children = (parents == 0).nonzero()[:, 0]
                row[children] = row[children.roll(1)]
        walk_tree(drawn, drafts, cu_num_logits, idx, tree, *out)

    monkeypatch.setattr(module, "walk_tree", walk)
    tokens, alone, _ = emitted(0.0, error=8.0)
    assert tokens != alone


def test_k_v_that_stays_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This negative control leaves the accepted path's K/V where the tree had it."""
    monkeypatch.setattr(module, "compact_kv", lambda *args, **kwargs: None)
    tokens, alone, _ = emitted(0.0, error=8.0)
    assert tokens != alone


def test_a_step_needs_no_vllm() -> None:
    code = "import sys; sys.modules['vllm'] = None; import vllm_graft.spec_decode.step"
    finished(sys.executable, "-c", code)
