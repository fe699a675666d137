"""The kernels of a memory of texts, against plain references."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.support.references.memory_reference import Found, PlainMemory, begin_of
from tests.support.references.ngram_reference import Trie, check_nodes, continuation, nodes_in
from tests.support.worlds.ngram_worlds import learned_of
from vllm_graft.spec_decode.kernels.candidates import finish_tree
from vllm_graft.spec_decode.kernels.ngram_insert import insert_ngrams, insert_paths, learn_rates
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.kernels.text_memory import (
    drop_corpus,
    search_memory,
    write_corpus,
    write_memory,
)
from vllm_graft.spec_decode.kernels.verify import walk_tree
from vllm_graft.spec_decode.trees.text_state import (
    BORDER,
    MAX_PLACE,
    NOBODY,
    SEGMENT,
    SEGMENT_BYTES,
    MemoryState,
    NgramState,
    Owner,
    bytes_of,
)
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeState, num_candidates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALIKE, FIRST = 4, 3


class World:
    """Slots with texts of several owners, in both forms: the kernels' state, and plain lists."""

    def __init__(
        self, seed: int, *, vocab: int = 4, segments: int = 11, slots: int = 4, matches: int = 3,
        width: int = 300, reference: int = 0, corpora: int = 0,
    ) -> None:  # fmt: skip
        self.rng, self.vocab, self.width, self.slots = random.Random(seed), vocab, width, slots
        rows = slots + 1
        size = bytes_of(segments, rows)
        more = corpora * SEGMENT_BYTES
        self.memory = MemoryState.allocate(size, rows, DEVICE, more)
        assert (self.memory.size, self.memory.corpora) == (segments, corpora)
        assert self.memory.num_bytes == size + more
        self.state = NgramState.allocate(
            2, 16, rows, width, DEVICE, matches, reference, self.memory
        )
        self.plain = PlainMemory(self.memory.size, rows)
        self.texts: dict[int, list[int]] = {}
        self.seen = self.nodes = self.deepest = 0

    def add(self, slot: int, owner: Owner, prompt: list[int], first: int | None = None) -> None:
        self.texts[slot] = list(prompt)
        first = begin_of(prompt) if first is None else first
        self.memory.begin(slot, owner, first)
        self.memory.tell()
        self.plain.begin(slot, owner, first)
        self.state.notes[slot].zero_()

    def random(self, count: int) -> list[int]:
        """Tokens, often copied from some text."""
        known = [each for text in self.texts.values() for each in text]
        if known and self.rng.random() < 0.6:
            start = self.rng.randrange(len(known))
            return known[start : start + count]
        return [self.rng.randrange(self.vocab) for _ in range(count)]

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.full((self.slots + 1, self.width), -9, dtype=torch.int32)
        total = torch.zeros(self.slots + 1, dtype=torch.int32)
        for slot, text in self.texts.items():
            source[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
            total[slot] = len(text)
        return source.to(DEVICE), total.to(DEVICE)

    def write(self, slots: list[int]) -> None:
        source, total = self.tensors()
        index = torch.tensor(slots, device=DEVICE)
        write_memory(self.memory, source, total, index, len(slots))
        self.plain.write(self.texts, slots)
        self.check_tokens()

    def check_tokens(self) -> None:
        assert self.memory.head.tolist() == [self.plain.head, 0]
        for serial, segment in self.plain.segments.items():
            place = serial % self.memory.size
            padded = segment.tokens + [BORDER] * (SEGMENT - len(segment.tokens))
            assert self.memory.tokens[place].tolist() == padded
            before = 0 if segment.before is None else segment.before.serial
            behind = 0 if segment.behind is None else segment.behind.serial % self.memory.size + 1
            expected = [*segment.owner, before, behind, segment.number]
            assert self.memory.segments[place].tolist() == expected
        cells = {
            (bucket, way): address
            for bucket, row in enumerate(self.memory.cells.tolist())
            for way, address in enumerate(row)
            if address
        }
        assert cells == self.plain.cells

    def match(self, slots: list[int]) -> list[list[int]]:
        """Compare what the memory's program finds with the reference; return the keys."""
        source, total = self.tensors()
        index = torch.tensor(slots, device=DEVICE)
        match_ngrams(self.state, source, total, index, len(slots))
        search_memory(self.state, total, index, len(slots))
        found = self.state.keys[: len(slots), -self.state.matches :].tolist()
        rates = self.state.rates.tolist()
        for row, slot in zip(found, slots, strict=True):
            expected = self.expected(slot, rates) if slot >= 0 else []
            assert row == expected + [0] * (self.state.matches - len(expected))
            self.seen += len(expected)
        return found

    def expected(self, slot: int, rates: list[float]) -> list[int]:
        columns, lengths = self.state.history.shape[1], self.state.lengths
        found = self.plain.search(slot, self.texts[slot], self.state.min_n, self.state.max_n)

        def order(each: Found) -> tuple[float, int, int]:
            return rates[2 * lengths + each.kind], each.kind, each.place

        kept: dict[tuple[int, ...], int] = {}
        for each in sorted(found, key=order, reverse=True):
            assert each.owner.scope == self.plain.writers[slot].owner.scope
            following = (each.behind + [BORDER] * ALIKE)[:ALIKE]
            kept.setdefault(tuple(following), each.kind * MAX_PLACE + columns + each.place - 1)
        return list(kept.values())[: self.state.matches]

    def grow(self, slots: list[int], depth: int) -> CandidateTable:
        """Make trees of what `match` has found, and compare them with the reference."""
        _, total = self.tensors()
        paths, rows = self.state.matches, len(slots)
        table = CandidateTable.allocate(rows, 1, FIRST, DEVICE, extra=paths * depth)
        index = torch.tensor(slots, device=DEVICE)
        rates, keys = self.state.rates.tolist(), self.state.keys.tolist()
        options = {"first": FIRST, "depth": depth, "vocab_size": self.vocab}
        insert_paths(table, self.state, total, index, rows, **options)
        for row, slot in enumerate(slots):
            if slot >= 0:
                found, trie = self.trie(slot, keys[row], rates, depth)
                check_nodes(nodes_in(table, row, FIRST, paths, depth), trie)
                bits = sum(1 << number for number, each in enumerate(found) if each[2])
                assert self.state.sources is not None
                assert int(self.state.sources[row]) == bits
                self.nodes += len(trie.owners)
                self.deepest = max([self.deepest, *map(len, trie.owners)])
        return table

    def trie(
        self, slot: int, keys: list[int], rates: list[float], depth: int
    ) -> tuple[list[tuple[list[int], float, bool]], Trie]:
        """The matches of some keys, best first, and the tree of them."""
        columns, lengths, text = self.state.history.shape[1], self.state.lengths, self.texts[slot]
        found: dict[tuple[int, ...], tuple[list[int], float, bool]] = {}
        ranked = []
        for key in filter(None, keys):
            n, start = divmod(key, MAX_PLACE)
            start += 1
            if start < columns:
                behind = continuation(text, start, max(depth, ALIKE))
                ranked.append((rates[n], key, behind, False))
                continue
            place, inside = divmod(start - columns, SEGMENT)
            (serial,) = (s for s in self.plain.segments if s % self.memory.size == place)
            address = serial * SEGMENT + inside
            behind = self.plain.tokens_behind(address)
            ranked.append((rates[2 * lengths + n], key, behind, True))
        for rate, _, behind, is_remembered in sorted(ranked, key=lambda e: e[:2], reverse=True):
            alike = tuple((behind + [BORDER] * ALIKE)[:ALIKE])
            found.setdefault(alike, (behind[:depth], rate, is_remembered))
        best = list(found.values())[: self.state.matches]
        return best, Trie([(path, rate) for path, rate, _ in best])


def run(seed: int, steps: int = 45, **options: Any) -> World:
    """Texts that grow and copy each other, slots that change hands, a ring that wraps."""
    here = World(seed, **options)
    rng = here.rng
    for slot in range(here.slots):
        here.add(slot, Owner(5 + slot % 2, rng.choice([7, 8])), here.random(12))
    while steps := steps - 1:
        slots = [*rng.sample(range(here.slots), rng.randint(1, here.slots)), -1]
        rng.shuffle(slots)
        here.write(slots)
        here.match(slots)
        here.grow(slots, 63 if steps == 3 else rng.randint(1, 3))
        learn_rates(learned_of(here.state))
        for slot in slots:
            if slot < 0:
                continue
            text = here.texts[slot]
            text += here.random(rng.choice([1, 3, 10, 70]))
            if len(text) > here.width - 80:
                owner = rng.choice([Owner(5, 7), Owner(6, 7), Owner(6, 8), NOBODY])
                here.add(slot, owner, here.random(rng.randint(1, 30)), rng.choice([None, 0]))
    return here


@pytest.mark.parametrize("seed", range(3))
def test_everything_equals_the_reference(seed: int) -> None:
    here = run(seed, matches=[1, 3, 8][seed])
    assert here.seen > 40
    assert here.nodes > 100
    assert here.deepest > 10
    # The ring went around, and rates of classes were learned.
    assert here.plain.head > 2 * here.memory.size
    learned = here.state.rates[2 * here.state.lengths :]
    guesses = World(0).state.rates[2 * here.state.lengths :]
    assert int((learned != guesses).sum()) > 3


SECRET = list(range(900, 930))
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def told(ours: Owner, theirs: Owner, *, prompt: list[int] = PROMPT) -> list[int]:
    """Answer one owner's prompt with a secret, then ask another's; return what is drafted."""
    here = World(0, segments=12, slots=2, vocab=1000)
    here.add(0, theirs, PROMPT)
    here.write([0])
    here.texts[0] += SECRET
    here.write([0])
    here.add(0, NOBODY, [])  # The text itself is gone.
    here.add(1, ours, prompt)
    here.match([1])
    table = here.grow([1], 20)
    real = table.scores[0] > -1e19
    return list(table.tokens[0][real & (torch.arange(len(real), device=DEVICE) >= FIRST)].tolist())


def test_an_answer_is_drafted_for_its_tenant_alone() -> None:
    """Planted secrets, counted among the drafts; the controls are those who may see them."""
    ours = Owner(5, 7)
    assert told(ours, ours) == SECRET[:20]
    assert told(Owner(5, 8), ours) == SECRET[:20]
    for other in (Owner(6, 7), Owner(6, 6), Owner(7, 5), NOBODY):
        assert told(other, ours) == []
    assert told(ours, NOBODY) == []
    assert told(ours, ours, prompt=[9, 2, 6, 5, 77]) == []


def test_without_scopes_a_secret_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a memory that ignores scopes tells everybody."""
    begin = MemoryState.begin

    def alike(memory: MemoryState, slot: int, owner: Owner, first: int) -> None:
        begin(memory, slot, Owner(1, 1), first)

    monkeypatch.setattr(MemoryState, "begin", alike)
    plain = PlainMemory.begin
    monkeypatch.setattr(PlainMemory, "begin", lambda *args: plain(*args[:2], Owner(1, 1), args[3]))
    assert told(Owner(6, 7), Owner(5, 7)) == SECRET[:20]


PLACES = [22, 0, 39, 1]


def of_corpora(here: World, owner: Owner, prompt: list[int]) -> list[int]:
    here.add(0, owner, prompt)
    search(here, 0)
    _, total = here.tensors()
    table = CandidateTable.allocate(1, 1, FIRST, DEVICE, extra=3 * 20)
    slots = torch.tensor([0], device=DEVICE)
    options = {"first": FIRST, "depth": 20, "vocab_size": here.vocab}
    insert_paths(table, here.state, total, slots, 1, **options)
    real = table.scores[0] > -1e19
    real[:FIRST] = False
    return list(table.tokens[0][real].tolist())


def test_a_corpus_is_its_scope_s_until_it_is_dropped() -> None:
    """Corpora come and go in the same segments; each is found whole, by those who may."""
    here = World(0, segments=12, slots=2, vocab=10_000, corpora=40)
    texts = [[*range(1000 * k, 1000 * k + 200), BORDER, *range(50), BORDER] for k in (1, 2)]
    for serial, (scope, text) in enumerate(zip((5, 6), texts, strict=True), start=1):
        write_corpus(here.memory, scope, PLACES, text, 40 * serial)
        for start in (0, 55, 62, 126, 190):
            asked, following = text[start : start + 5], text[start + 5 : start + 25]
            expected = following[: following.index(BORDER)] if BORDER in following else following
            assert of_corpora(here, Owner(scope, 7), asked) == expected
            assert of_corpora(here, Owner(9, 7), asked) == []
        # No match goes from a text to the next one.
        assert of_corpora(here, Owner(scope, 7), [*text[198:200], 0]) == []
        assert of_corpora(here, Owner(scope, 7), [0, 1, 2]) == [*range(3, 23)]
        drop_corpus(here.memory, PLACES)
        assert of_corpora(here, Owner(scope, 7), text[:5]) == []
    # What is gone leaves no trace that hides what comes.
    write_corpus(here.memory, 5, [1], [*range(50), BORDER], 120)
    assert of_corpora(here, Owner(5, 7), [0, 1, 2]) == [*range(3, 23)]
    assert here.memory.head.tolist() == [1, 0]
    write_corpus(here.memory, 5, [], [], 160)


def test_what_only_looks_alike_is_not_drafted() -> None:
    """Each cell leads to another tenant's text, as hashes may; and to texts that are replaced."""
    here = World(0, segments=12, slots=2, vocab=1000)
    here.add(0, Owner(5, 7), PROMPT)
    here.texts[0] += SECRET
    here.write([0])
    (address,) = {SEGMENT + len(PROMPT) - begin_of(PROMPT)} & {*here.plain.cells.values()}
    for owner, prompt, finds in (
        (Owner(5, 7), PROMPT, True),
        (Owner(6, 7), PROMPT, False),
        (Owner(5, 7), [*PROMPT[:-1], 4], False),
    ):
        here.add(1, owner, prompt)
        here.memory.cells.fill_(address)
        (keys,) = search(here, 1)
        assert any(keys) == finds
    here.memory.head[0] += here.memory.size
    here.add(1, Owner(5, 7), PROMPT)
    (keys,) = search(here, 1)
    assert not any(keys)


def search(here: World, slot: int) -> list[list[int]]:
    """What the kernel finds, whatever the reference does."""
    source, total = here.tensors()
    slots = torch.tensor([slot], device=DEVICE)
    match_ngrams(here.state, source, total, slots, 1)
    search_memory(here.state, total, slots, 1)
    found: list[list[int]] = here.state.keys[:1, -here.state.matches :].tolist()
    return found


def test_the_same_prompt_and_frequent_answers_come_first() -> None:
    here = World(0, segments=40, slots=6, vocab=1000, matches=4)
    answers = [([8, 8], 1), ([7, 7], 1), ([7, 7], 2), ([7, 7], 1), ([7, 7], 1)]
    for slot, (answer, prompt) in enumerate(answers):
        # Answers go on in ways of their own, so that none is left out.
        here.add(slot, Owner(1, prompt), PROMPT)
        here.write([slot])
        here.texts[slot] += [*answer, 100 + slot, 200 + slot, 300]
        here.write([slot])
    here.add(5, Owner(1, 2), PROMPT)
    columns = here.state.history.shape[1]
    kinds, firsts = [], []
    for key in here.match([5])[0]:
        kinds.append(key // MAX_PLACE)
        place = key % MAX_PLACE + 1 - columns
        firsts.append(int(here.memory.tokens.flatten()[place]))
    # The same prompt's answer, then those that are frequent, then the other one.
    assert firsts == [7, 7, 7, 7]
    assert kinds[0] == kinds[1] + 16
    here.state.rates[2 * here.state.lengths + kinds[1]] = 0.01
    here.state.rates[2 * here.state.lengths + kinds[0]] = 0.01
    (key, *_) = here.match([5])[0]
    assert int(here.memory.tokens.flatten()[key % MAX_PLACE + 1 - columns]) == 8


def test_nodes_of_the_memory_are_counted_apart() -> None:
    """The second and the third of 3 paths are from there; each has a node at each of 2 depths."""
    table = CandidateTable.allocate(1, 7, 1, DEVICE, extra=6)
    table.scores[0] = torch.tensor([-9.0] * 7 + [-1, -2, -3, -4, -5, -6])
    table.tokens[0] = torch.tensor([0, 50, 51, 52, 53, 54, 55, 1, 2, 3, 4, 5, 6])
    table.parents[0] = torch.tensor([-1] * 10 + [7, 8, 9])
    tree, slots = TreeState.allocate(2, 7, DEVICE), torch.tensor([1], device=DEVICE)
    drafts = torch.zeros(1, 7, dtype=torch.int64, device=DEVICE)
    nodes = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    paths = torch.tensor([0b110], dtype=torch.int32, device=DEVICE)
    finish_tree(
        table, 1, 1, 7, slots, tree, drafts, num_extra=6, extra_nodes=nodes, of_memory=(paths, 3)
    )
    assert drafts[0].tolist() == [1, 2, 3, 4, 5, 6, 0]
    # The last node is the draft's; nodes 2, 3, 5 and 6 are from the memory.
    assert nodes.tolist() == [[0, 0b01111110], [0, 0b01101100]]
    counts = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    walk_tree(
        torch.tensor([2, 9, 5, 9, 9, 7, 9, 9], device=DEVICE),
        torch.tensor([9, *drafts[0].tolist()], device=DEVICE),
        torch.tensor([0, 8], dtype=torch.int32, device=DEVICE),
        slots,
        tree,
        torch.zeros(1, 8, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, 8, dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        extra_nodes=nodes,
        extra_counts=counts,
    )
    assert counts.tolist() == [6, 2, 4, 2]


@pytest.mark.parametrize("levels", [1, 2])
def test_one_path_beside_a_draft(levels: int) -> None:
    """It joins what the draft has found, is counted, and teaches the rate of its class."""
    here = World(0, segments=12, slots=2, vocab=1000, matches=1)
    for slot in range(2):
        here.add(slot, Owner(5, slot + 1), PROMPT)
    here.write([0])
    here.texts[0] += SECRET
    here.write([0, 1])
    key = here.match([1])[0][0]
    kind = key // MAX_PLACE
    first = num_candidates(2, levels)
    table = CandidateTable.allocate(1, 2, levels, DEVICE, extra=6)
    table.tokens[0, :2] = torch.tensor([SECRET[0], 4])
    table.parents[0, :2] = -1
    table.scores[0, :2] = torch.tensor([-9.0, -1.0])
    table.tokens[0, 2:first], table.scores[0, 2:first], table.parents[0, 2:first] = 1, -9.5, 1
    source, total = here.tensors()
    slots = torch.tensor([1], device=DEVICE)
    options: dict[str, Any] = {"levels": levels, "first": first, "depth": 6, "vocab_size": 1000}
    match_ngrams(here.state, source, total, slots, 1)
    search_memory(here.state, total, slots, 1)
    insert_ngrams(table, here.state, total, slots, 1, **options)
    assert table.tokens[0, first : first + 5].tolist() == SECRET[1:6]
    rate = here.state.rates[2 * here.state.lengths + kind].log()
    assert table.scores[0, first : first + 5].tolist() == pytest.approx(
        [float(d * rate) for d in range(2, 7)]
    )
    assert float(table.scores[0, 0]) == pytest.approx(float(rate))
    assert here.state.sources is not None
    assert here.state.sources[0] == 1
    here.texts[1] += [*SECRET[:3], 1]
    source, total = here.tensors()
    match_ngrams(here.state, source, total, slots, 1)
    search_memory(here.state, total, slots, 1)
    insert_ngrams(table, here.state, total, slots, 1, **options)
    assert here.state.pending[2 * here.state.lengths + kind].tolist() == [4, 3]


def test_a_long_text_takes_several_steps_and_a_lost_segment_none() -> None:
    here = World(0, segments=8, slots=2)
    here.add(0, Owner(1, 1), [*range(200)], 0)
    for _ in range(5):
        here.write([0])
    assert sum(len(each.tokens) for each in here.plain.segments.values()) == 200
    for _ in range(2):
        here.add(1, Owner(1, 1), [*range(250)], 0)
        for _ in range(4):
            here.write([1])
    # The first request's segments were all replaced: it goes on in a new one.
    here.texts[0] += [1, 2, 3]
    here.write([0, 1])
    assert here.memory.writers[0].tolist()[:2] == [200, 203]


def test_a_memory_has_the_bytes_that_it_is_given() -> None:
    small = MemoryState.allocate(bytes_of(128, 64), 64, DEVICE)
    assert (small.size, small.num_bytes) == (128, bytes_of(128, 64))
