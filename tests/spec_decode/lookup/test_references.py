"""References of requests: which tokens, in which order, and what is declined."""

import json
import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_graft.base import log
from vllm_graft.spec_decode.config.tree_config import NgramConfig, TreeConfig
from vllm_graft.spec_decode.lookup import references, served_references
from vllm_graft.spec_decode.lookup.ngrams import Ngrams, ReferenceCounts
from vllm_graft.spec_decode.lookup.references import (
    References,
    UnreadPredictions,
    Wrong,
    choices_in,
    prediction_of,
    styles_of,
)
from vllm_graft.spec_decode.lookup.schema_text import COMPACT, SPACED
from vllm_graft.spec_decode.lookup.served_references import carry
from vllm_graft.spec_decode.trees.text_state import BORDER, NONE, Reference, reference_in

PROMPT = [5, 6, 7, 8]
SCHEMA = {"properties": {"a": {"type": "string"}, "b": {"type": "null"}}}


class Letters:
    """A tokenizer with a token per character."""

    calls = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.calls += 1
        return [ord(character) for character in text]


class FastLetters(Letters):
    """The same one, which takes many texts at a time, as those of transformers in Rust."""

    is_fast = True

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        self.calls += 1
        encode = Letters().encode
        return {
            "input_ids": [encode(text, add_special_tokens=add_special_tokens) for text in texts]
        }


def made(tokenizer: Any = None, room: int = 200, *, any_whitespace: bool = False) -> References:
    return References(
        tokenizer,
        room=room,
        opening=3,
        vocab_size=1000,
        styles=styles_of(any_whitespace=any_whitespace),
    )


def pieces(found: Reference) -> list[str]:
    """The pieces of a reference as texts; what of it is the prompt's stands as digits."""
    text = "".join("|" if t == BORDER else str(t) if t < 10 else chr(t) for t in found.row)
    return text.split("|") if text else []


def asking(prediction: Any = None, **structured: Any) -> SamplingParams:
    forced = StructuredOutputsParams(**structured) if structured else None
    extra = None if prediction is None else {"graft_prediction": prediction}
    return SamplingParams(structured_outputs=forced, extra_args=extra)


def test_a_fast_tokenizer_is_asked_once_for_all_pieces() -> None:
    slow, fast = Letters(), FastLetters()
    asked = asking(json=SCHEMA)
    found = [made(each, any_whitespace=True).of(asked, PROMPT) for each in (slow, fast)]
    assert found[0] == found[1]
    assert len(pieces(found[0])) == 6
    assert slow.calls > fast.calls == 1


def test_what_each_source_gives() -> None:
    found = made(Letters())
    counts = ReferenceCounts()

    def of(*args: Any) -> Reference:
        counts.add(reference := found.of(*args))
        return reference

    assert of(SamplingParams(), PROMPT) is NONE
    assert of(None, PROMPT) is NONE
    # The end of the prompt stands before what opens an answer.
    assert pieces(of(asking(json=SCHEMA), PROMPT)) == ['678{"a":"', '","b":null}']
    assert pieces(of(asking(json=json.dumps(SCHEMA)), [])) == ['{"a":"', '","b":null}']
    assert pieces(of(asking(choice=["yes", "no"]), None)) == ["no", "yes"]
    assert pieces(of(asking("so be it"), PROMPT)) == ["678so be it"]
    assert list(of(asking([50, 51]), PROMPT).row) == [6, 7, 8, 50, 51]
    both = of(asking("so", json=SCHEMA), PROMPT)
    assert pieces(both) == ['678{"a":"', '","b":null}', "678so"]
    for silent in ({"json_object": True}, {"regex": "a+"}, {"grammar": "root ::= 'a'"}):
        assert of(asking(**silent), PROMPT) is NONE
    assert counts.tokens == {"schema": 3 * 17, "choice": 5, "prediction": 8 + 2 + 2}
    assert not counts.declines.total()


def test_choices_come_as_a_grammar_too() -> None:
    """VLLM writes a grammar of them for xgrammar, before the worker sees the request."""
    from vllm.v1.structured_output.utils import choice_as_grammar

    choices = ['a "b"', "c\\d\n", "é | e", "\x01", ""]
    assert choices_in(choice_as_grammar(choices)) == choices
    for other in (
        'root ::= "a" b',
        'root ::= "a"*',
        'x ::= "a"',
        "",
        'root ::= "\\xff"',
        "root ::= ",
    ):
        assert choices_in(other) is None
    found = made(Letters())
    asked = asking(grammar=choice_as_grammar(["yes", "no"]))
    assert pieces(found.of(asked, PROMPT)) == ["678no", "678yes"]
    assert found.of(asked, PROMPT).tokens == {"choice": 5}
    assert found.of(asking(grammar='root ::= "a" * '), PROMPT) is NONE


def test_the_likeliest_style_stands_last() -> None:
    found = made(Letters(), any_whitespace=True)
    text = pieces(found.of(asking(json=SCHEMA), []))
    assert text[0] == '{\n  "a": "'
    assert text[-2:] == ['{"a": "', '", "b": null}']
    assert styles_of(any_whitespace=True)[0] is SPACED
    assert styles_of(any_whitespace=False) == (COMPACT,)
    # Where there is no room for all of them, that one is kept.
    assert pieces(made(Letters(), 25, any_whitespace=True).of(asking(json=SCHEMA), [])) == text[-2:]


def test_what_has_no_room_is_cut() -> None:
    found = made(Letters(), room=10)
    for given in ("0123456789abc", "0123456789", list(range(48, 60))):
        cut = found.of(asking(given), PROMPT)
        assert pieces(cut) == ["6780123456"]
        assert cut.declines == ("cut",)
    assert found.of(asking("0123456"), PROMPT).declines == ()
    # The whole of a forced piece, or none of it.
    forced = found.of(asking(json=SCHEMA), PROMPT)
    assert pieces(forced) == ['678{"a":"']
    assert forced.declines == ("cut",)
    assert pieces(made(Letters(), room=8).of(asking(json=SCHEMA), PROMPT)) == []
    assert pieces(found.of(asking("x" * 1000), [])) == ["x" * 10]
    for size in range(30):
        for params in (asking("abc", json=SCHEMA), asking("abcdefgh", choice=["yes", "no"])):
            assert len(made(Letters(), size + 1).of(params, PROMPT).row) <= size + 1


def test_tokens_of_a_schema_are_made_once() -> None:
    letters = Letters()
    found = made(letters)
    first = found.of(asking(json=SCHEMA), PROMPT)
    calls = letters.calls
    assert found.of(asking(json=SCHEMA), PROMPT) == first
    assert letters.calls == calls > 0
    assert found.of(asking(json={"const": 1}), PROMPT) != first
    assert letters.calls > calls


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (asking(3), "wrong_type"),
        (asking({"type": "content"}), "wrong_type"),
        (asking(["a"]), "wrong_type"),
        (asking([True]), "wrong_type"),
        (asking([1000]), "wrong_type"),
        (asking([-1]), "wrong_type"),
        (asking(json="{"), "unreadable"),
        (asking(json={}), "unreadable"),
        (asking(json="[" * 9999), "unreadable"),
        (asking(json=json.dumps({"const": 1, "x": "y" * (1 << 16)})), "unreadable"),
    ],
)
def test_what_is_declined(params: SamplingParams, reason: str) -> None:
    """Bad input costs a request nothing but its reference."""
    found = made(Letters())
    for _ in range(2):
        assert found.of(params, PROMPT) == Reference(declines=(reason,))
    # What is right beside it is of use.
    params.extra_args = params.extra_args or {"graft_prediction": "yes"}
    params.structured_outputs = params.structured_outputs or StructuredOutputsParams(json=SCHEMA)
    assert found.of(params, PROMPT).row


@pytest.mark.parametrize(
    "params",
    [
        asking("half of a pair: \ud800"),
        asking(json={"properties": {"a": {"const": "\udfff"}}, "required": ["a"]}),
        asking(choice=["yes", "\ud800"]),
    ],
)
def test_what_a_tokenizer_refuses_harms_no_request(params: SamplingParams) -> None:
    class Strict(Letters):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            text.encode()
            return super().encode(text, add_special_tokens=add_special_tokens)

    found = made(Strict())
    assert found.of(params, PROMPT) == Reference(declines=("error",))
    assert found.of(asking("fine"), PROMPT).row


class Panic(BaseException):
    """This one is no Exception, as pyo3's is none."""


@pytest.mark.parametrize("raised", [Panic("bad split"), SystemExit(3), MemoryError()])
def test_a_tokenizer_that_panics_ends_no_process(raised: BaseException) -> None:
    class Broken(Letters):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            raise raised

    for params in (asking("text"), asking(json=SCHEMA), asking(choice=["a"])):
        assert made(Broken()).of(params, PROMPT) == Reference(declines=("error",))
    # The negative control, and what the user may do.
    raised = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        made(Broken()).of(asking("text"), PROMPT)


def test_without_a_tokenizer_tokens_alone_are_read() -> None:
    found = made(None)
    assert list(found.of(asking([50]), PROMPT).row) == [6, 7, 8, 50]
    for params in (asking("text"), asking(json=SCHEMA), asking(choice=["a"])):
        assert found.of(params, PROMPT) == Reference(declines=("no_tokenizer",))


def test_wrong_predictions_are_explained() -> None:
    assert prediction_of(asking("yes"), 9, 5) == ("yes", False)
    assert prediction_of(asking([1, 8]), 9, 2) == ([1, 8], False)
    assert prediction_of(asking([1, 8, "?"]), 9, 2) == ([1, 8], True)
    for nothing in (SamplingParams(extra_args={"other": 1}), asking(""), asking([])):
        assert prediction_of(nothing, 9, 5) is None
    wrong = prediction_of(asking([1, 9]), 9, 5)
    assert isinstance(wrong, Wrong)
    assert wrong.reason == "9 in it is no token id, which are integers from 0 to 8."
    assert "it is a int: send a text" in str(prediction_of(asking(4), 9, 5))
    # No text of a request is shown, and a number of thousands of digits is none that can be.
    for strange in ("\x1b[31m" + "B" * 2_000_000, -(10**18), [[5] * 99]):
        assert len(str(prediction_of(asking([strange]), 9, 5))) < 200


def test_wrong_predictions_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    found = made(Letters())
    log.warning_once.cache_clear()
    ours = logging.getLogger("vllm.graft")
    ours.addHandler(caplog.handler)
    try:
        for number in range(50):
            assert found.of(asking([5000 + number]), PROMPT).declines == ("wrong_type",)
    finally:
        ours.removeHandler(caplog.handler)
        log.warning_once.cache_clear()
    assert len(set(caplog.messages)) == 1
    assert "5000 in it is no token id" in caplog.messages[0]


def request(params: SamplingParams | None) -> Any:
    return SimpleNamespace(sampling_params=params, prompt_token_ids=PROMPT)


def test_a_slot_never_shows_the_last_request_s_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    config = NgramConfig(min=3, max=3, reference=8)
    ngrams = Ngrams(config, 3, 16, 1000, torch.device("cpu"), reference=8)
    references = made(Letters(), 8)
    state, empty = ngrams.state, [BORDER] * 8
    assert state.reference == 8
    written: list[int] = []
    refer = type(state).refer

    def counted(self: Any, slot: int, tokens: list[int]) -> None:
        written.append(slot)
        refer(self, slot, tokens)

    def begin(params: SamplingParams | None) -> None:
        new = request(params)
        carry(new, references)
        # As it comes to another process.
        ngrams.begin(1, pickle.loads(pickle.dumps(new)))

    monkeypatch.setattr(type(state), "refer", counted)
    begin(asking([50, 51]))
    assert state.history[1, 16:].tolist() == [6, 7, 8, 50, 51, BORDER, BORDER, BORDER]
    assert state.history[0, 16:].tolist() == state.history[2, 16:].tolist() == empty
    begin(asking([52]))
    assert state.history[1, 16:].tolist() == [6, 7, 8, 52, BORDER, BORDER, BORDER, BORDER]
    for params in (SamplingParams(), None, asking(3)):
        begin(params)
        assert state.history[1, 16:].tolist() == empty
    # Only what changes is written.
    assert written == [1, 1, 1]
    numbers = ngrams.numbers()
    assert numbers["reference_tokens"] == {"schema": 0, "choice": 0, "prediction": 3}
    assert {reason for reason, n in numbers["reference_declines"].items() if n} == {"wrong_type"}
    # What nobody made into a reference is none: ids of a request could lead out of the vocabulary.
    ngrams.begin(1, request(asking([1 << 30])))
    assert state.history[1, 16:].tolist() == empty


def test_what_a_request_predicts_goes_no_further() -> None:
    """The parameters that a caller gave stay as they are, and may be those of other requests."""
    for reader, declines in ((made(Letters()), ()), (None, ("off",))):
        given = asking("so be it")
        assert given.extra_args is not None
        given.extra_args["other"] = 1
        asked = request(given)
        carry(asked, reader)
        assert asked.sampling_params is not given
        assert given.extra_args == {"graft_prediction": "so be it", "other": 1}
        assert asked.sampling_params.extra_args["other"] == 1
        found = reference_in(asked.sampling_params)
        assert found.declines == declines
        assert bool(found.row) == (reader is not None)
        plain = SamplingParams()
        asked = request(plain)
        carry(asked, reader)
        assert asked.sampling_params is plain


def test_misspelt_keys_of_requests_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    log.warning_once.cache_clear()
    keys = ("graft_predicton", "Graft-Prediction", "vllm_graft_prediction", "graftprediction")
    for reader in (made(Letters()), None, made(Letters())):
        for key in (*keys, "their_graft", "prediction", "graft_prediction"):
            carry(request(SamplingParams(extra_args={key: "so be it"})), reader)
    hint = "is not read by vllm-graft. Did you mean 'graft_prediction'?"
    assert caplog.messages == [f"vllm_xargs.{key!r} of a request {hint}" for key in keys]
    # Neither one request nor many of them decide how much is logged.
    for first in (0, 1000):
        many: dict[Any, int] = {
            f"graft_{number}{'x' * 999}": 1 for number in range(first, first + 1000)
        }
        carry(request(SamplingParams(extra_args={7: 1, **many})), None)
    assert len(caplog.messages) == log.MOST
    assert max(map(len, caplog.messages)) < 300


def test_predictions_that_nothing_reads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("vllm_graft.spec_decode.lookup.references.warning_once", said.append)
    watch = UnreadPredictions()
    for params in (None, SamplingParams(), asking("x"), asking(3)):
        watch.begin(0, request(params))
    assert watch.numbers() == {"reference_declines": {"off": 2}}
    assert "set --additional-config.graft.tree.ngram" in said[0]


def test_a_wrong_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without borders the pieces are others."""
    monkeypatch.setattr(references, "BORDER", ord("+"))
    with pytest.raises(AssertionError):
        test_what_each_source_gives()


def test_an_engine_carries_references_from_its_intake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the engine that is told to, and once."""
    monkeypatch.setattr(served_references, "served_references", lambda *args: made(Letters()))
    taken: list[str] = []

    def engine() -> Any:
        def preprocess_add_request(given: Any) -> tuple[Any, int]:
            taken.append("in")
            return given, 7

        return SimpleNamespace(preprocess_add_request=preprocess_add_request)

    ours, other = engine(), engine()
    for _ in range(2):
        served_references.carry_references(ours, TreeConfig(), SimpleNamespace())  # type: ignore[arg-type]
    asked, wave = ours.preprocess_add_request(request(asking("so")))
    assert wave == 7
    assert pieces(reference_in(asked.sampling_params)) == ["678so"]
    asked, _ = other.preprocess_add_request(request(asking("so")))
    assert reference_in(asked.sampling_params) is NONE
    assert taken == ["in", "in"]
