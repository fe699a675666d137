"""Every kind of request, through an engine without drafts and through one with a tree."""

import re
from typing import Any, NamedTuple

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engines.pairs import Answer, Pair, Request, answer_all, differing, scheduling
from vllm_graft.spec_decode.chunking import graph_fit
from vllm_graft.spec_decode.kernels.history import PathTokens, path_tokens
from vllm_graft.spec_decode.verification import sampler
from vllm_graft.spec_decode.verification import sampler as verify
from vllm_graft.testing.engine import model_runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TOKENS = 12
EOS = 1
GREEDY = {"temperature": 0}

# Of words of several tokens, drafts often hold all but the last.
WORDS = [
    *("in_file", "sys.stdin", "else:", "pathname", "NamePatterns", "not in", "if not"),
    *("warnings.warn", "import codecs", "encode(", "self.test", "return package"),
]
PENALIZED: dict[str, dict[str, Any]] = {
    "repetition penalty": {**GREEDY, "repetition_penalty": 1.3},
    "bad words": {**GREEDY, "bad_words": WORDS, "max_tokens": 16},
    "presence penalty": {"seed": 1, "presence_penalty": 0.8},
    "frequency penalty": {"seed": 2, "frequency_penalty": 0.8},
}
KINDS: dict[str, dict[str, Any]] = {
    "thinking budget": {**GREEDY, "thinking_token_budget": 4, "max_tokens": 16},
    **PENALIZED,
    "grammar": {**GREEDY, "structured_outputs": r"[0-9]{4}-[a-f]{6}", "ignore_eos": False},
    "grammar and penalty": {
        "seed": 13,
        "structured_outputs": r"[a-z_\.\(\) \n=]{12,60}",
        "repetition_penalty": 1.2,
    },
    "greedy": GREEDY,
    "seed": {"seed": 3},
    "temperature": {"seed": 4, "temperature": 0.6},
    "top-k and top-p": {"seed": 5, "top_k": 20, "top_p": 0.8},
    "least length": {**GREEDY, "min_tokens": 8, "stop_token_ids": list(range(200, 320))},
    "allowed tokens": {"seed": 8, "allowed_token_ids": list(range(3, 2000, 5))},
    "several answers": {"seed": 9, "n": 3},
    "logprobs": {**GREEDY, "logprobs": 2},
    "logprobs of samples": {"seed": 10, "logprobs": 0, "top_k": 5},
    "logprobs of chosen tokens": {**GREEDY, "logprob_token_ids": [9, 300, 1500]},
    "prompt logprobs": {**GREEDY, "prompt_logprobs": 1},
    "stop string": {**GREEDY, "stop": ["\n"], "max_tokens": 40},
    "stop token": {"seed": 11, "stop_token_ids": list(range(3, 2000, 15)), "max_tokens": 40},
    "end of text": {
        "seed": 12,
        "temperature": 2.0,
        "allowed_token_ids": [EOS, *range(3, 9)],
        "ignore_eos": False,
        "max_tokens": 40,
    },
}
THINKING: dict[str, Any] = {
    "reasoning_config": {"reasoning_start_str": " hereby", "reasoning_end_str": " return self"}
}
"""The first prompt ends where the model begins to think; several tokens end that."""
STOPPED = ["stop string", "stop token", "end of text"]


JOINING = "a token that joins others"
"""This request is none of the kinds, all of which are sent at once."""


class Found(NamedTuple):
    """Answers by kind, and the tree's part of `graft_info()`."""

    answers: dict[str, Answer]
    info: dict[str, Any]
    unmended: Answer
    """The answer to the token that joins others, with vLLM's own function."""


def joining(llm: Any, pair: Pair) -> Answer:
    """Send a prompt of one token, with its logprobs, beside requests that run already."""
    engine = llm.llm_engine
    for number, prompt in enumerate(pair.prompts[:2]):
        engine.add_request(f"running {number}", prompt, SamplingParams(**GREEDY, max_tokens=40))
    for _ in range(4):
        engine.step()
    wanted = SamplingParams(**GREEDY, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    engine.add_request(JOINING, {"prompt_token_ids": [77]}, wanted)
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    return Answer.of(last[JOINING])


def requests(pair: Pair) -> list[Request]:
    prompts = pair.prompts[1:3] + pair.prompts[4:6]
    return [
        Request(
            # After the first prompt the stops come late enough to be in mid-tree.
            prompts[0 if kind in STOPPED else i % len(prompts)],
            parameters({"max_tokens": TOKENS, **params}),
        )
        for i, (kind, params) in enumerate(KINDS.items())
    ]


def parameters(params: dict[str, Any]) -> dict[str, Any]:
    regex = params.get("structured_outputs")
    return (
        {**params, "structured_outputs": StructuredOutputsParams(regex=regex)} if regex else params
    )


@pytest.fixture(scope="module")
def alone(pair: Pair) -> dict[str, Answer]:
    with pair.engine(**THINKING) as llm:
        answers = dict(zip(KINDS, answer_all(llm, requests(pair)), strict=True))
        return {**answers, JOINING: joining(llm, pair)}


@pytest.fixture(scope="module")
def treed(pair: Pair) -> Found:
    """Requests of all kinds run at once.

    Most steps with prompts have more than 24 rows, so trees are cut.
    """
    options: dict[str, Any] = {"max_num_seqs": 5, "async_scheduling": True, **THINKING}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_fit, "graph_rows", lambda *_: 24)
        return _treed(pair, options)


def _treed(pair: Pair, options: dict[str, Any]) -> Found:
    with pair.engine(nodes=12, topk=4, steps=3, **options) as llm:
        # This comes first, while no tree was drafted in the slot that the request gets.
        first = joining(llm, pair)
        answers = dict(zip(KINDS, answer_all(llm, requests(pair)), strict=True))
        (info,) = llm.collective_rpc("graft_info")
        answers[JOINING] = first
        # Our function hides vLLM's on the engine's instance; delete it.
        del model_runner(llm).prompt_logprobs_worker.compute_prompt_logprobs
        return Found(answers, info["counters"]["tree"], joining(llm, pair))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_target_alone(
    alone: dict[str, Answer], treed: Found, kind: str
) -> None:
    found, wanted = treed.answers[kind], alone[kind]
    assert found == wanted
    for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        for place, reference in zip(ours, theirs, strict=True):
            assert place == pytest.approx(reference, abs=1e-4)


def test_a_prompt_of_one_token_has_no_logprobs_of_others(
    alone: dict[str, Answer], treed: Found
) -> None:
    assert alone[JOINING].logprobs[-1] == []
    assert treed.answers[JOINING] == alone[JOINING]
    assert treed.answers[JOINING].logprobs[-1] == []
    # There, each of the tree's placeholders has a row, with the slot's earlier content.
    assert treed.unmended == alone[JOINING]
    assert len(treed.unmended.logprobs[-1]) == 12


def test_the_kinds_are_what_they_say(alone: dict[str, Answer], treed: Found) -> None:
    """This guards the test above: parameters that change nothing would test nothing."""
    assert re.fullmatch(KINDS["grammar"]["structured_outputs"], alone["grammar"].texts[0])
    assert len({tuple(tokens) for tokens in alone["several answers"].tokens}) == 3
    for kind in STOPPED:
        assert alone[kind].reasons == ["stop"]
        assert 4 < len(alone[kind].tokens[0]) < 40, kind
    for kind in ("logprobs", "logprobs of samples", "prompt logprobs"):
        assert any(alone[kind].logprobs)
    chosen = {9, 300, 1500}
    assert all(chosen <= place.keys() for place in alone["logprobs of chosen tokens"].logprobs[0])
    assert " return self" in alone["thinking budget"].texts[0]
    assert treed.info["verify_steps"] > treed.info["cut_steps"] > 0


def test_without_their_paths_bad_words_and_thoughts_come_through(
    pair: Pair, alone: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: bad words and thinking budgets see what was emitted, and no drafts."""

    def rootless(*args: Any) -> PathTokens:
        found = path_tokens(*args)
        return PathTokens(found.tokens, found.lengths.zero_())

    monkeypatch.setattr(sampler, "path_tokens", rootless)
    asked = dict(zip(KINDS, requests(pair), strict=True))
    kinds = ["bad words", "thinking budget"]
    with pair.engine(nodes=12, topk=4, steps=3, **THINKING) as llm:
        answers = answer_all(llm, [asked[kind] for kind in kinds])
    for kind, answer in zip(kinds, answers, strict=True):
        assert answer != alone[kind], kind


@pytest.mark.nightly
def test_processed_logprobs_chunk_by_chunk(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is a chunk of its own, so the float32 logits of only one are kept at a time."""
    kinds: list[dict[str, Any]] = [
        {**GREEDY, "logprobs": 2},
        {"seed": 10, "logprobs": 0, "top_k": 5},
        {"seed": 4, "temperature": 0.6},
    ]
    asked = [Request(pair.prompts[i], {"max_tokens": TOKENS, **k}) for i, k in enumerate(kinds)]
    with pair.engine(logprobs_mode="processed_logprobs") as llm:
        expected = answer_all(llm, asked)
    monkeypatch.setattr(verify, "MAX_CHUNK_BYTES", 1)
    split, counts = verify._chunks, []

    def chunks(*args: Any) -> Any:
        found = split(*args)
        counts.append(len(found))
        return found

    monkeypatch.setattr(verify, "_chunks", chunks)
    with pair.engine(nodes=12, topk=4, steps=3, logprobs_mode="processed_logprobs") as llm:
        found = answer_all(llm, asked)
    assert max(counts) == len(kinds)
    assert not differing(found, expected)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert len(ours.logprobs[0]) == len(theirs.logprobs[0]) == TOKENS
        for place, reference in zip(ours.logprobs[0], theirs.logprobs[0], strict=True):
            assert place == pytest.approx(reference, abs=1e-4)


def test_max_model_len_in_mid_tree(pair: Pair) -> None:
    """The scheduler keeps only the first nodes where the sequence's end is near."""
    long = [Request(pair.prompts[1], {"max_tokens": 500, **kind}) for kind in (GREEDY, {"seed": 1})]
    with pair.engine(max_model_len=44) as llm:
        expected = answer_all(llm, long)
    with pair.engine(nodes=31, topk=8, steps=3, max_model_len=44) as llm:
        prompt = len(llm.get_tokenizer().encode(pair.prompts[1]))
        with scheduling(llm) as seen:
            assert not differing(answer_all(llm, long), expected)
    assert seen.cut_trees > 0
    assert [prompt + len(answer.tokens[0]) for answer in expected] == [44, 44]


def test_abort(pair: Pair, alone: dict[str, Answer]) -> None:
    """A request aborted between two steps leaves; its slot and its blocks are used again."""
    with pair.engine(nodes=12, topk=4, steps=3, max_num_seqs=2) as llm:
        engine = llm.llm_engine
        doomed = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        names = [engine.add_request(name, pair.prompts[4], doomed) for name in ("one", "two")]
        for _ in range(3):
            engine.step()
        engine.abort_request(names, internal=True)
        found = answer_all(llm, requests(pair)[1:4])
    assert not differing(found, [alone[kind] for kind in list(KINDS)[1:4]])
