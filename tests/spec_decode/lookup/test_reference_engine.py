"""Real engines whose n-grams are found in references too: schemas, choices and predictions."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from tests.support.answers.text_requests import COMPACT
from tests.support.engines.pairs import (
    Answer,
    Pair,
    Request,
    answer_all,
    counter,
    crowded,
    differing,
    scheduling,
)
from tests.support.references.ngram_reference import Match, Reference, best_match
from tests.support.watches import wrap
from vllm_graft.spec_decode.lookup import ngrams
from vllm_graft.spec_decode.lookup.ngrams import Ngrams
from vllm_graft.spec_decode.lookup.references import References
from vllm_graft.spec_decode.trees.text_state import KEY, MAX_PLACE, NONE
from vllm_graft.spec_decode.trees.text_state import Reference as Carried

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 24
TREE: dict[str, Any] = {"nodes": 15, "topk": 4, "steps": 2}
FORCED = {
    "type": "object",
    "properties": {"self": {"const": "return self.name"}, "value": {"enum": ["import", "raise"]}},
    "required": ["self", "value"],
    "additionalProperties": False,
}
CHOICES = ["return self.name.value", "raise ValueError(self.name)"]


def structured(pair: Pair) -> list[Request]:
    """Schemas and choices, greedy and seeded."""
    return [
        Request(
            pair.prompts[number],
            {
                "max_tokens": TOKENS,
                "ignore_eos": False,
                **kind,
                "structured_outputs": StructuredOutputsParams(**forced),
            },
        )
        for number, forced in enumerate(({"json": FORCED}, {"choice": CHOICES}))
        for kind in ({"temperature": 0}, {"seed": 5, "temperature": 0.7})
    ]


def plain(pair: Pair) -> list[Request]:
    """Requests whose answers can be predicted, a greedy and a seeded one."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 7}]
    return [
        Request(pair.prompts[2 + number], {"max_tokens": TOKENS, **kind})
        for number, kind in enumerate(kinds)
    ]


def predicting(request: Request, prediction: Any) -> Request:
    return Request(request.prompt, {**request.params, "extra_args": {KEY: prediction}})


def predicted(pair: Pair, answers: list[Answer]) -> list[Request]:
    """The plain requests, each with the very answer: as text, and as tokens."""
    first, second = plain(pair)
    return [predicting(first, answers[0].texts[0]), predicting(second, answers[1].tokens[0])]


class Watch:
    """Compares each match with that of plain references in the text and the request's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[int, list[int]] = {}
        self.seen: Counter[str] = Counter()
        self.made: dict[int, list[int]] = {}
        wrap(
            monkeypatch,
            (ngrams, "match_ngrams", self.match),
            (Ngrams, "begin", self.begin),
            (References, "of", self.of),
        )

    def of(self, original: Callable[..., Any], ours: References, params: Any, prompt: Any) -> Any:
        found = original(ours, params, prompt)
        self.made[hash(tuple(prompt))] = list(found.row)
        return found

    def begin(self, original: Callable[..., None], ours: Ngrams, slot: int, request: Any) -> None:
        original(ours, slot, request)
        self.seen["reused"] += slot in self.rows
        self.rows[slot] = self.made[hash(tuple(request.prompt_token_ids))]

    def match(self, original: Callable[..., None], state: Any, texts: Any, lengths: Any, slots: Any,
              num_reqs: int) -> None:  # fmt: skip
        original(state, texts, lengths, slots, num_reqs)
        for row, slot in enumerate(slots.tolist()[:num_reqs]):
            if slot < 0:
                continue
            text = texts[slot, : int(lengths[slot])].tolist()
            reference = Reference(state.width, self.rows[slot])
            expected = best_match(text, reference, state.min_n, state.max_n)
            key = int(state.keys[row].max())
            found = Match(key % MAX_PLACE + 1, key // MAX_PLACE) if key else None
            assert found == expected
            self.seen["compared"] += 1
            self.seen["in references"] += found is not None and found.start >= state.width


def lengths(llm: Any) -> Callable[[], float]:
    """A function that tells the acceptance length since its last call, from our metrics."""
    before = [0.0, 0.0]

    def tell() -> float:
        now = [counter(llm, f"vllm:graft_tree_{name}") for name in ("nodes_accepted", "trees")]
        accepted, trees = (new - old for new, old in zip(now, before, strict=True))
        before[:] = now
        return 1 + accepted / trees

    return tell


def labelled(llm: Any, name: str, label: str) -> dict[str, float]:
    """Values of a counter by those of a label."""
    return {m.labels[label]: m.value for m in llm.get_metrics() if m.name == name}


def test_a_prediction_is_accepted_nearly_to_its_end(pair: Pair) -> None:
    with pair.engine(**COMPACT) as llm:
        answers = answer_all(llm, plain(pair))
    with pair.engine(**TREE, tree={"ngram": True}, **COMPACT) as llm:
        tell = lengths(llm)
        assert not differing(answer_all(llm, plain(pair)), answers)
        without = tell()
        assert not differing(answer_all(llm, predicted(pair, answers)), answers)
        assert tell() > max(6, 1.7 * without)
        tokens = labelled(llm, "vllm:graft_tree_reference_tokens", "source")
        assert tokens == {"schema": 0, "choice": 0, "prediction": sum(2 * [TOKENS])}


@pytest.mark.nightly
def test_same_answers_and_more_of_them_per_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked prompts, shared prefixes, preemption, slots that change hands; then controls."""
    forced, free = structured(pair), plain(pair)
    with pair.engine(**COMPACT) as llm:
        alone, answers = answer_all(llm, forced), answer_all(llm, free)
    watch = Watch(monkeypatch)
    told = predicted(pair, answers)
    with pair.engine(**TREE, tree={"ngram": True}, **crowded(3, blocks=13, **COMPACT)) as llm:
        tell = lengths(llm)
        with scheduling(llm) as schedule:
            # Prompts of several chunks beside drafts, and more requests than there are slots.
            assert not differing(answer_all(llm, [*forced, *told]), [*alone, *answers])
        tell()
        assert not differing(answer_all(llm, told), answers)
        with_prediction = tell()
        assert not differing(answer_all(llm, forced), alone)
        with_schema = tell()
        tokens = labelled(llm, "vllm:graft_tree_reference_tokens", "source")
        # What is wrong harms nothing, and neither does another answer's prediction.
        wrong = [predicting(free[0], {"a": 1}), predicting(free[1], answers[0].texts[0])]
        assert not differing(answer_all(llm, wrong), answers)
        declined = labelled(llm, "vllm:graft_tree_reference_declines", "reason")
        tell()
        # The control: the same engine without references.
        monkeypatch.setattr(References, "of", lambda *args: NONE)
        watch.rows.clear()
        watch.made = defaultdict(list)
        assert not differing(answer_all(llm, told), answers)
        without_prediction = tell()
        assert not differing(answer_all(llm, forced), alone)
        without_schema = tell()
        (info,) = llm.collective_rpc("graft_info")
        # Negative control: the watch sees a reference that belongs to another request.
        monkeypatch.setattr(References, "of", lambda *args: Carried(answers[0].tokens[0]))
        with pytest.raises(Exception, match="assert"):
            answer_all(llm, free)
    assert schedule.preempted > 0
    assert schedule.prompt_chunks > 0
    assert watch.seen["reused"] > 5
    assert watch.seen["compared"] > watch.seen["in references"] > 20
    # Nearly to its end: a step accepts as much as a tree is deep.
    assert with_prediction > 6
    assert with_prediction > 1.7 * without_prediction
    # The pair's target spells most of what a schema forces in other tokens than its tokenizer.
    assert with_schema > without_schema + 0.05
    assert tokens.keys() == {"schema", "choice", "prediction"}
    assert min(tokens.values()) > 0
    assert {reason for reason, count in declined.items() if count} == {"wrong_type"}
    rates = info["counters"]["tree"]["ngrams"]["reference_rates"]
    assert list(rates) == list(range(1, 17))
    assert rates[16] != pytest.approx(1 - 1 / 17, abs=1e-4)
