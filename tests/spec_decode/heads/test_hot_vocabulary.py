"""Hot tokens: the learned vocabulary, its rows, and their gains."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_graft.spec_decode.heads import fp8_head, hot_vocabulary
from vllm_graft.spec_decode.heads.fp8_head import Fp8Head, Fp8Rows, PlainRows, take_rows
from vllm_graft.spec_decode.heads.hot_vocabulary import (
    COVERAGE,
    LATE,
    LOST,
    PERIOD,
    READ,
    RECENT,
    HotGains,
    HotVocabulary,
)
from vllm_graft.spec_decode.lookup.served_references import carry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, DRAFT, SIZE = 60, 20, 5
TARGETS = [3 * row for row in range(DRAFT)]
"""The target's id of each draft token."""


@pytest.fixture
def head() -> torch.Tensor:
    return torch.arange(DRAFT * 4.0, device=DEVICE).view(DRAFT, 4)


@pytest.fixture
def hot(head: torch.Tensor) -> HotVocabulary:
    rows = PlainRows(SimpleNamespace(weight=head, tp_size=1), SIZE)
    return HotVocabulary(SIZE, torch.tensor(TARGETS, device=DEVICE), VOCAB, rows)


def serve(hot: HotVocabulary, text: dict[int, int], steps: int = PERIOD) -> None:
    """Let `steps` pass; the first emits `text`, a count for each token."""
    for token, count in text.items():
        hot.emitted[token] += count
    for _ in range(steps):
        hot.step()


def in_use(hot: HotVocabulary) -> bool:
    return hot.narrows(7, 1)


def test_the_most_frequent_tokens_are_chosen(hot: HotVocabulary, head: torch.Tensor) -> None:
    serve(hot, {57: 9, 30: 1, 33: 4, 6: 2, 3: 2, 0: 1})
    # Tokens are in the target's order; the first of two tokens that were emitted once is taken.
    assert hot.target_ids.tolist() == [0, 3, 6, 33, 57]
    assert isinstance(hot.rows, PlainRows)
    chosen = [TARGETS.index(token) for token in hot.target_ids.tolist()]
    assert torch.equal(hot.rows.weight, head[chosen])
    states = torch.randn(3, 4, device=DEVICE)
    assert torch.equal(hot.rows.multiply(states), states @ head[chosen].t())
    assert not hot.emitted.any()


def test_addresses_stay(hot: HotVocabulary) -> None:
    def addresses() -> list[int]:
        held: Any = hot.rows
        return [each.data_ptr() for each in (hot.target_ids, held.weight, hot.emitted)]

    before = addresses()
    serve(hot, {57: 9, 30: 1}, 3 * PERIOD)
    assert before == addresses()


def test_it_is_used_once_a_later_text_was_covered(hot: HotVocabulary) -> None:
    text = {57: 9, 30: 5, 33: 4}
    serve(hot, text, PERIOD + LATE)
    # A vocabulary is chosen, but its coverage is unknown: only a guess was judged so far.
    assert (in_use(hot), hot.coverage, hot.choices) == (False, None, 1)
    serve(hot, text, PERIOD - 1)
    assert not in_use(hot)
    serve(hot, {}, 1)
    assert in_use(hot)
    report = hot.report()
    assert report == {
        "size": SIZE,
        "bytes": SIZE * 16,
        "active": True,
        "coverage": 1.0,
        "choices": 2,
        "steps": 1,
    }
    assert hot.numbers() == {"hot_steps": 1, "hot_coverage": 1.0}


def test_a_guess_that_fits_is_not_believed(hot: HotVocabulary) -> None:
    serve(hot, {0: 50}, PERIOD + LATE)
    assert not in_use(hot)


@pytest.mark.parametrize("missed", [1, 2, 3])
def test_it_is_used_while_it_holds_nearly_all(hot: HotVocabulary, missed: int) -> None:
    serve(hot, {57: 9, 30: 5, 33: 4}, 2 * PERIOD + LATE)
    assert not in_use(hot)
    serve(hot, {57: 100 - missed, 15: missed})
    assert hot.coverage == pytest.approx(1 - missed / 100)
    assert in_use(hot) is (missed < 2)
    assert pytest.approx(0.98) == COVERAGE


def test_what_it_must_hold_depends_on_what_it_saves(hot: HotVocabulary) -> None:
    serve(hot, {57: 9, 30: 5, 33: 4}, 2 * PERIOD + LATE)
    serve(hot, {57: 90, 15: 10})
    assert not in_use(hot)
    hot.least = lambda nodes, num_reqs: {(7, 1): 0.85, (7, 16): 0.95}[nodes, num_reqs]
    assert hot.narrows(7, 1)
    assert not hot.narrows(7, 16)


def test_recent_texts_weigh_most(hot: HotVocabulary) -> None:
    serve(hot, {57: 9}, PERIOD + LATE)
    serve(hot, {57: 100})
    serve(hot, {57: 80, 15: 20})
    assert hot.coverage == pytest.approx((100 * RECENT + 80) / (100 * RECENT + 100))


def test_another_text_is_learned_in_a_few_periods(hot: HotVocabulary) -> None:
    old, new = dict.fromkeys([0, 3, 6, 9, 12], 10), dict.fromkeys([45, 48, 51, 54, 57], 10)
    serve(hot, old, PERIOD + LATE)
    serve(hot, old)
    assert in_use(hot)
    # After two periods the old text still weighs as much as the new one.
    for _ in range(2):
        serve(hot, new)
        assert not in_use(hot)
    serve(hot, new)
    assert hot.target_ids.tolist() == [45, 48, 51, 54, 57]
    before = hot.coverage
    serve(hot, new)
    assert before is not None
    assert hot.coverage is not None
    assert hot.coverage > before


def test_tokens_of_new_prompts_are_chosen(hot: HotVocabulary) -> None:
    """An answer speaks of what was asked, before anything of it was emitted."""
    hot.begin(0, request([15, 15, 18, 18, 1, VOCAB + 7, -1]))
    serve(hot, {57: 9, 30: 1, 33: 4, 6: 1, 9: 1})
    assert hot.target_ids.tolist() == [6, 15, 18, 33, 57]
    serve(hot, {12: 3, 24: 3})
    assert 18 not in hot.target_ids.tolist(), "a prompt counts once"
    hot.begin(1, request(None))
    serve(hot, {})


def request(tokens: list[int] | None) -> Any:
    return SimpleNamespace(prompt_token_ids=tokens)


def test_only_the_end_of_a_long_prompt_counts(hot: HotVocabulary) -> None:
    hot.read([51] * 100 + [54] * READ)
    hot.read([48] * 3)
    serve(hot, {0: 1, 3: 1, 6: 1, 9: 1, 12: 1, 15: 1})
    assert hot.target_ids.tolist() == [0, 3, 6, 48, 54]


def test_more_prompts_than_there_is_room_for_are_left_out(
    hot: HotVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_vocabulary, "_ROOM", 4)
    hot.read([54, 54, 51])
    hot.read([48, 48, 48])
    hot.read([45] * 9)
    serve(hot, {})
    assert 48 in hot.target_ids.tolist()
    assert 45 not in hot.target_ids.tolist()


def test_prompts_are_written_where_no_copy_reads(hot: HotVocabulary) -> None:
    """The device may still copy the prompts of one period while those of the next come."""
    hot.read([57])
    first = hot._read.data_ptr()
    serve(hot, {})
    hot.read([54])
    assert hot._read.data_ptr() != first
    assert int(hot._copying[0]) == 57
    serve(hot, {})
    assert hot._read.data_ptr() == first


def test_what_no_draft_can_propose_counts_for_nothing(hot: HotVocabulary) -> None:
    text = {57: 9, 58: 1000}
    serve(hot, text, PERIOD + LATE)
    serve(hot, text)
    assert hot.coverage == 1.0
    assert 57 in hot.target_ids.tolist()


def test_silence_changes_nothing(hot: HotVocabulary) -> None:
    serve(hot, {57: 9}, PERIOD + LATE)
    serve(hot, {57: 9})
    assert in_use(hot)
    serve(hot, {}, 4 * PERIOD)
    assert in_use(hot)
    assert 57 in hot.target_ids.tolist()


def test_the_host_waits_for_nothing_but_the_event(
    hot: HotVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads the copy, `LATE` steps after it was made."""
    read: list[int] = []
    steps = 0
    tolist = torch.Tensor.tolist

    def noted(tensor: torch.Tensor) -> Any:
        read.append(steps)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", noted)
    monkeypatch.setattr(torch.Tensor, "item", lambda _: pytest.fail("a value was waited for"))
    for _ in range(2 * PERIOD):
        steps += 1
        hot.begin(0, request([3, 6, 9]))
        hot.step()
    # The first copy is read although no choice was made before it.
    assert read == [LATE, PERIOD + LATE]


def test_texts_of_requests_that_do_not_teach_are_not_read(hot: HotVocabulary) -> None:
    """A slot teaches again with a request that does."""

    def begin(slot: int, salt: str | None, *tokens: int) -> None:
        asked: Any = SimpleNamespace(
            sampling_params=SamplingParams(), prompt_token_ids=list(tokens), cache_salt=salt
        )
        carry(asked, None, learn_salted=False)
        hot.begin(slot, asked)

    teaches = hot.keep_apart(3)
    begin(1, "a", *[57] * 90)
    assert teaches.tolist() == [1, 0, 1]
    begin(2, None, 30, 30)
    begin(1, None, 33, 33)
    begin(0, "a", 57)
    assert teaches.tolist() == [0, 1, 1]
    serve(hot, {})
    assert 57 not in hot.target_ids.tolist()
    assert {30, 33} <= set(hot.target_ids.tolist())
    # The control: what is not kept apart counts.
    hot.teaches = None
    begin(1, "a", *[57] * 90)
    serve(hot, {})
    assert 57 in hot.target_ids.tolist()


WHOLE = {0: {1: 5.0}, 1: {1: 5.5, 4: 6.0}, 7: {1: 8.0, 4: 10.0, 16: 20.0}}
HOT = {1: {1: 5.5, 4: 6.0}, 7: {1: 6.0, 4: 9.0, 16: 19.8}}


@pytest.fixture
def gains() -> HotGains:
    return HotGains(WHOLE, HOT)


@pytest.mark.parametrize(
    ("nodes", "num_reqs", "gain"),
    [(7, 1, 0.25), (7, 2, 0.1), (7, 4, 0.1), (7, 16, 0.01), (7, 40, 0.01), (1, 1, 0), (0, 1, 0)],
)
def test_the_next_larger_batch_tells_the_gain(
    gains: HotGains, nodes: int, num_reqs: int, gain: float
) -> None:
    assert gains.gain(nodes, num_reqs) == pytest.approx(gain)
    assert gains.least(nodes, num_reqs) == pytest.approx(1 - gain / LOST)


def test_nothing_is_held_for_nothing(gains: HotGains) -> None:
    """Where hot tokens save nothing, no coverage is enough."""
    assert gains.least(1, 1) >= 1.0
    assert gains.least(31, 1) >= 1.0, "a number that was not measured"
    assert HotGains(WHOLE, {7: {1: 9.0}}).least(7, 1) >= 1.0


def test_costs_are_those_of_what_steps_will_draft_from(gains: HotGains) -> None:
    assert gains.least(7, 16) > COVERAGE
    assert gains.expected() == {0: {1: 5.0}, 1: {1: 5.5, 4: 6.0}, 7: {1: 6.0, 4: 9.0, 16: 20.0}}


ROWS_VOCAB, HIDDEN = 97, 64
IDS = [0, 3, 47, 48, 49, 95, 96]


def weight() -> torch.Tensor:
    made = torch.randn(ROWS_VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
    return made.to(torch.bfloat16).to(DEVICE)


def ids() -> torch.Tensor:
    return torch.tensor(IDS, device=DEVICE)


def layer(rows: torch.Tensor) -> Any:
    return SimpleNamespace(weight=rows, tp_size=1)


def shards(rows: torch.Tensor) -> list[Any]:
    """The layers of two ranks; shards are padded to one size, as in vLLM."""
    layers = []
    for start, end in ((0, 48), (48, ROWS_VOCAB)):
        bounds = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
        shard = rows.new_zeros(50, HIDDEN)
        shard[: end - start] = rows[start:end]
        layers.append(SimpleNamespace(tp_size=2, weight=shard, shard_indices=bounds))
    return layers


def test_rows_are_those_of_the_head() -> None:
    whole = weight()
    rows = PlainRows(layer(whole), len(IDS))
    rows.take(ids())
    assert torch.equal(rows.weight, whole[IDS])
    assert rows.num_bytes == len(IDS) * HIDDEN * 2


def test_rows_in_fp8_are_those_of_the_head() -> None:
    whole = weight()
    fp8 = Fp8Head(whole)
    rows = Fp8Rows(fp8, layer(whole), len(IDS))
    rows.take(ids())
    assert torch.equal(rows.rows.weight.view(torch.uint8), fp8.weight.view(torch.uint8)[IDS])
    assert torch.equal(rows.rows.scale, fp8.scale[IDS])
    assert rows.num_bytes == len(IDS) * (HIDDEN + 4)
    states = weight()[:5]
    logits = rows.multiply(states)
    assert torch.equal(logits, fp8.apply(fp8, states)[:, IDS])
    # Negative control: rows of other tokens have other logits.
    rows.take(ids() - ids().sign())
    assert not torch.equal(rows.multiply(states), logits)


@pytest.mark.parametrize("chunk", [4096, 3])
def test_rows_of_a_sharded_head(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    import vllm.distributed

    monkeypatch.setattr(fp8_head, "_EXCHANGED", chunk)

    monkeypatch.setattr(vllm.distributed, "tensor_model_parallel_all_reduce", lambda rows: rows)
    whole = weight()
    first, second = (take_rows(shard, ids()) for shard in shards(whole))
    assert torch.equal(first + second, whole[IDS])
    found = []
    for shard in shards(whole):
        rows = PlainRows(shard, len(IDS))
        rows.take(ids())
        found.append(rows.weight)
    assert torch.equal(found[0] + found[1], whole[IDS])


@pytest.mark.parametrize("chunk", [4096, 3])
def test_fp8_rows_of_a_sharded_head(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Each rank gets the bytes of all: those that it holds, and those of the others."""
    monkeypatch.setattr(fp8_head, "_EXCHANGED", chunk)
    whole = weight()
    sent: list[torch.Tensor] = []

    def first_pass(rows: torch.Tensor) -> torch.Tensor:
        sent.append(rows.clone())
        return rows[None]

    def take(shard: Any) -> Fp8Rows:
        rows = Fp8Rows(Fp8Head(shard.weight, 2), shard, len(IDS))
        rows.take(ids())
        return rows

    monkeypatch.setattr(fp8_head, "gather_rows", first_pass)
    first, second = shards(whole)
    take(first)
    of_first, sent = sent, []
    monkeypatch.setattr(fp8_head, "gather_rows", lambda rows: torch.stack((of_first.pop(0), rows)))
    found = take(second).rows
    expected = Fp8Head(whole)
    assert torch.equal(found.weight.view(torch.uint8), expected.weight.view(torch.uint8)[IDS])
    assert torch.equal(found.scale, expected.scale[IDS])
    assert found.tp_size == 1, "each rank has all rows, so that nothing is gathered"
