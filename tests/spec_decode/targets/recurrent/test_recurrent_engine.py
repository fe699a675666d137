"""Targets with recurrent layers: trees answer as the target alone does.

On a device heads have their true sizes, and states are float32. In float32 answers have to be those
of the target. VLLM's kernels of the gated delta rule for prompts need 16 bits: there a plain loop
stands in for them, with and without trees. In bfloat16 they run as they are; there a decode and the
rows of a tree are rounded otherwise, so answers may part where two tokens are about equally
probable, and nowhere else.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.answers.near_ties import answers as with_logprobs
from tests.support.answers.near_ties import check_near_ties
from tests.support.answers.text_requests import both_kinds
from tests.support.engines.cache_engines import metrics as cache_metrics
from tests.support.engines.cache_engines import transfer
from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.one_configuration import one_configuration
from tests.support.engines.pair_fixtures import ON_CPU, ON_CUDA, params
from tests.support.engines.pairs import counter, differing
from tests.support.engines.recorded_engine import recorded_engine
from tests.support.engines.recurrent_layers import exact_prompts, interpreted
from tests.support.engines.spoilt_rows import first_rows, in_order
from tests.support.models.random_models import VOCABULARY
from tests.support.models.recurrent_models import (
    draft_shape,
    write_falcon_h1,
    write_granite_hybrid,
    write_nemotron_h,
    write_qwen3_next,
)
from tests.support.models.served_qwen import (
    image_request,
    rows_at_their_slots,
    write_served_qwen3_5,
    write_text_qwen3_5,
)
from tests.support.watches import count_launches
from vllm_graft.plan.memory import memory_of
from vllm_graft.spec_decode.chunking import graph_fit
from vllm_graft.spec_decode.targets.families import UnchangedState
from vllm_graft.spec_decode.targets.recurrent import recurrent_family, recurrent_layer
from vllm_graft.spec_decode.targets.recurrent.recurrent_family import RecurrentFamily
from vllm_graft.spec_decode.targets.recurrent.recurrent_kinds import (
    TreeDeltaRule,
    TreeSelectiveState,
)
from vllm_graft.testing import cpu_engine, greedy, model_runner, spec_metrics, write_eagle3

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NODES = 7
NEAR = 0.5
"""Largest gap of log-probabilities that rounding to bfloat16 explains."""

_RANDOM = random.Random(0)


def prompt_of(length: int) -> list[int]:
    return [_RANDOM.randrange(2, VOCABULARY) for _ in range(length)]


class Sizes(NamedTuple):
    """What is asked of an engine on a device, and its target's sizes.

    More prompts come than run at once, so that prompts meet trees. A long prompt ends before the
    second block does, on a device before the third, and its tokens fill this block and the next.
    """

    prompts: list[list[int]]
    tokens: int
    long: list[int]
    long_tokens: int
    delta: dict[str, Any]
    mamba: dict[str, Any]
    hidden: int


SIZES = {
    # The last prompt is padded with placeholders for drafts, as others run when it comes.
    "cpu": Sizes(
        [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 60)), [11]], 12,
        list(range(100, 159)), 48, {}, {}, 64,
    ),
    # Some are longer than a step's tokens.
    "cuda": Sizes(
        [prompt_of(_RANDOM.choice([1, 3, 17, 40, 90, 300])) for _ in range(32)], 24,
        prompt_of(540), 420,
        {"heads": (2, 4), "head": 128, "hidden": 256},
        {"heads": 4, "head": 64, "state": 128, "hidden": 256}, 256,
    ),
}  # fmt: skip

FORMS = [("inputs",), ("states",)]
NIGHTLY_FORMS = pytest.mark.parametrize(
    ("device", "form"), params(nightly=FORMS, cuda=FORMS), scope="module"
)


@pytest.fixture(autouse=True, scope="module")
def kernels(device: str) -> Iterator[None]:
    with interpreted() if device == "cpu" else one_configuration():
        yield


@pytest.fixture(scope="module")
def sizes(device: str) -> Sizes:
    return SIZES[device]


@pytest.fixture(scope="module")
def target(sizes: Sizes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_next(tmp_path_factory.mktemp("recurrent"), **sizes.delta)


@pytest.fixture(scope="module")
def draft(sizes: Sizes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle3(tmp_path_factory.mktemp("head"), draft_shape(sizes.hidden))


@contextlib.contextmanager
def engine(
    device: str,
    target: Path,
    *,
    method: str = "",
    draft: Path | None = None,
    nodes: int = NODES,
    form: str = "auto",
    dtype: str = "float32",
    shape: str = "fixed",
    ranges: list[tuple[int, int, int]] | None = None,
    **options: Any,
) -> Iterator[Any]:
    """An engine without drafts, or with trees from the table or, with ``mtp``, from the module."""
    given: dict[str, Any] = {}
    if method:
        speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": nodes}
        tree: dict[str, Any] = {"topk": 2, "steps": 4, "recurrent": True, "shape": shape}
        tree["recurrent_form"] = form
        if ranges:
            speculative["num_speculative_tokens_per_batch_size"] = ranges
        if method == "eagle3":
            speculative["model"], tree["drafter"] = str(draft), "table"
        elif method == "ngram_gpu":
            speculative |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
            tree["drafter"] = "table_alone"
        options["speculative_config"], given["graft"] = speculative, {"tree": tree}
    options = {"skip_tokenizer_init": True, "additional_config": given} | options
    if device == "cpu":
        # Others wait for one of the first two: their prompts meet trees.
        made: Any = recorded_engine if "graphs" in options else cpu_engine
        with made(target, **{"max_model_len": 128, "max_num_seqs": 2} | options) as llm:
            yield llm
        return
    given["gdn_prefill_backend"] = "triton"
    usual: dict[str, Any] = {
        "dtype": dtype, "mamba_ssm_cache_dtype": "float32", "max_model_len": 2048,
        "max_num_batched_tokens": 256, "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 2**30,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        if dtype == "float32":
            stack.enter_context(exact_prompts())
        yield stack.enter_context(exact_engine(target, drafts=nodes, **usual | options))


def answers(llm: Any, sizes: Sizes) -> list[list[int]]:
    """Tokens of greedy and of seeded requests."""
    return both_kinds(llm, sizes.prompts, sizes.tokens)


def check_parts(llm: Any, device: str, form: str = "inputs") -> None:
    """Trees ran, beside prompts too, on every recurrent layer, which keep inputs in that form."""
    runner = model_runner(llm)
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    names = ("_forward_core", "conv_ssm_forward")
    cores = [getattr(layer, name, None) for layer in layers for name in names]
    assert sum(isinstance(core, (TreeDeltaRule, TreeSelectiveState)) for core in cores) == 2
    counters, kept = runner.speculator.context.counters, runner.speculator.context.kept_bytes
    print(f"counters: {counters}, {spec_metrics(llm)}")
    assert (counters.tree_replays if device == "cuda" else counters.tree_launches) > 0
    assert counters.mixed_launches > 0
    assert bool(kept) is (form == "inputs")
    if device == "cpu":
        planned = {row.what: row.num_bytes for row in memory_of(llm.llm_engine.vllm_config)[0]}
        assert planned.get("inputs of tree rows", 0) == kept


class Expected(NamedTuple):
    """What the target answers alone, and at length."""

    alone: list[list[int]]
    long: list[int]


@pytest.fixture(scope="module")
def expected(device: str, target: Path, sizes: Sizes) -> Expected:
    with engine(device, target, enable_prefix_caching=device == "cuda") as llm:
        alone = answers(llm, sizes)
        # The prompts meet other ones here, and the target's answers have to be the same.
        assert greedy(llm, sizes.prompts, sizes.tokens) == alone[: len(sizes.prompts)]
        return Expected(alone, greedy(llm, [sizes.long], sizes.long_tokens)[0])


@pytest.fixture
def table(expected: Expected, learn: Any) -> None:
    """Drafts from a table of the target's tokens are accepted far more than a random head's."""
    learn([*expected.alone, expected.long])


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("form", ["inputs", pytest.param("states", marks=pytest.mark.nightly)])
@ON_CPU
def test_trees_answer_as_the_target_alone(
    device: str,
    form: str,
    target: Path,
    draft: Path,
    sizes: Sizes,
    expected: Expected,
    launches: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tree beside the prompt of 40 tokens keeps 3 of 7 nodes."""
    monkeypatch.setattr(graph_fit, "graph_rows", lambda *_: 44)
    with engine(device, target, method="eagle3", draft=draft, form=form) as llm:
        assert answers(llm, sizes) == expected.alone
        check_parts(llm, device, form)
        assert model_runner(llm).speculator.context.counters.cut_steps
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts
    assert bool(launches["tree_chunk"]) is (form == "inputs")
    assert bool(launches["tree_recurrence"]) is (form == "states")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each kernel of the gated delta rule was launched, layers told apart."""
    return count_launches(monkeypatch, recurrent_layer, "tree_recurrence", "tree_chunk")


@pytest.mark.usefixtures("table")
@NIGHTLY_FORMS
def test_states_by_prefix_and_graphs(
    device: str, form: str, target: Path, draft: Path, sizes: Sizes, expected: Expected
) -> None:
    """States move on from block to block while trees are verified; FULL graphs hold the kernels."""
    more: dict[str, Any] = {"graphs": [1, 2, 8, 16], "block_size": 32} if device == "cpu" else {}
    more |= {"method": "eagle3", "draft": draft, "form": form, "enable_prefix_caching": True}
    long = expected.long
    with engine(device, target, **more) as llm:
        config = model_runner(llm).vllm_config.cache_config
        full = (len(sizes.long) + sizes.long_tokens - 8) // config.block_size
        assert config.mamba_cache_mode == "align"
        assert len(sizes.long) < full * config.block_size
        if device == "cuda":
            assert differing(answers(llm, sizes), expected.alone) == []
            check_parts(llm, device, form)
        assert greedy(llm, [sizes.long], sizes.long_tokens) == [long]
        before = counter(llm, "vllm:prefix_cache_hits")
        for _ in range(2):
            assert greedy(llm, [sizes.long + long[:-8]], 8) == [long[-8:]]
        # Two of three full blocks are taken: speculation leaves out the last one.
        hits = counter(llm, "vllm:prefix_cache_hits") - before
        assert full == 3
        assert hits >= 2 * config.block_size
        assert device == "cuda" or hits == 64
        assert model_runner(llm).speculator.context.counters.tree_replays
        metrics = spec_metrics(llm)
    assert metrics.acceptance_length > (1.5 if device == "cuda" else 2)


@pytest.mark.nightly
@pytest.mark.usefixtures("table")
@ON_CPU
def test_forms_take_turns(
    device: str,
    target: Path,
    draft: Path,
    sizes: Sizes,
    expected: Expected,
    launches: dict[str, int],
) -> None:
    """One request at a time has seven drafts, two have one each: then the rows leave states."""
    more: dict[str, Any] = {"shape": "auto", "ranges": [(1, 1, 7), (2, 2, 1)]}
    with engine(device, target, method="eagle3", draft=draft, **more) as llm:
        assert answers(llm, sizes) == expected.alone
    assert launches["tree_chunk"]
    assert launches["tree_recurrence"]


@pytest.mark.nightly
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("load", ["async", "layerwise"])
@ON_CPU
def test_states_come_back_from_the_host(
    load: str, device: str, target: Path, draft: Path, sizes: Sizes, expected: Expected
) -> None:
    """The host cache has K/V and states that trees have left at the ends of blocks."""
    more: dict[str, Any] = {"enable_prefix_caching": True, "block_size": 32}
    more |= {"method": "eagle3", "draft": draft, "kv_transfer_config": transfer(load=load)}
    long = expected.long
    with engine(device, target, **more) as llm:
        assert greedy(llm, [sizes.long], sizes.long_tokens) == [long]
        assert greedy(llm, [sizes.long + long[:40]], 8) == [long[40:]]
        # With async scheduling vLLM frees the last blocks a step late.
        while not llm.reset_prefix_cache():
            llm.llm_engine.step()
        assert counter(llm, "vllm:external_prefix_cache_hits") == 0
        assert greedy(llm, [sizes.long + long[:40]], 8) == [long[40:]]
        # Speculation leaves out the last of three full blocks, on the host as on the device.
        assert counter(llm, "vllm:external_prefix_cache_hits") == 64
        assert cache_metrics(llm)["hit_tokens_host"] == 64
        assert counter(llm, "vllm:prefix_cache_hits") == 0


SPOILT = [
    ("states", "commit"),
    ("inputs", "first rows"),
    ("states", "parents"),
    ("inputs", "parents"),
]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("device", "form", "spoilt"), params(nightly=SPOILT, cuda=SPOILT[:2]), scope="module"
)
def test_answers_differ_without(
    device: str,
    form: str,
    spoilt: str,
    target: Path,
    draft: Path,
    sizes: Sizes,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative controls: accepted states stay where they are, the state is continued by the first
    rows, whatever was accepted, or rows follow the one before."""
    if spoilt == "commit":
        monkeypatch.setattr(RecurrentFamily, "state", lambda *_: UnchangedState())
    elif spoilt == "first rows":
        stock = recurrent_family.fold_states
        monkeypatch.setattr(recurrent_family, "fold_states", first_rows(stock))
    else:
        name = "tree_recurrence" if form == "states" else "keep_rows"
        monkeypatch.setattr(recurrent_layer, name, in_order(getattr(recurrent_layer, name)))
    with engine(device, target, method="eagle3", draft=draft, form=form) as llm:
        wrong = differing(answers(llm, sizes), expected.alone)
    assert len(wrong) > (8 if device == "cuda" else 0)


@NIGHTLY_FORMS
def test_the_target_s_own_module_drafts(
    device: str, form: str, target: Path, sizes: Sizes, expected: Expected
) -> None:
    """Its drafts are wrong, as its weights are random: every step goes on from the root's state."""
    with engine(device, target, method="mtp", form=form) as llm:
        assert differing(answers(llm, sizes), expected.alone) == []
        assert type(model_runner(llm).speculator).__name__ == "MtpTrees"
        if device == "cuda":
            check_parts(llm, device, form)


@NIGHTLY_FORMS
def test_mamba_2_answers_as_the_target_alone(
    device: str,
    form: str,
    sizes: Sizes,
    tmp_path: Path,
    learn: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """VLLM's CPU has no states at the ends of blocks, so that prefix caching is off there."""
    target = write_nemotron_h(tmp_path / "target", **sizes.mamba)
    draft = write_eagle3(tmp_path / "draft", draft_shape(sizes.hidden, layers=6))
    cached = {"enable_prefix_caching": device == "cuda"}
    trees: dict[str, Any] = {"method": "eagle3", "draft": draft, "form": form}
    with engine(device, target, **cached) as llm:
        expected = answers(llm, sizes)
    learn(expected)
    with engine(device, target, **trees, **cached) as llm:
        mode = model_runner(llm).vllm_config.cache_config.mamba_cache_mode
        assert (mode == "align") is (device == "cuda")
        assert differing(answers(llm, sizes), expected) == []
        check_parts(llm, device, form)
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 2
    if device == "cpu":
        assert metrics.accepted_tokens > metrics.drafts
        with engine(device, target, **trees, **cached, graphs=[8, 16]) as llm:
            assert answers(llm, sizes) == expected
            assert model_runner(llm).speculator.context.counters.tree_replays
    # Negative control: what is accepted stays in the columns of its nodes.
    monkeypatch.setattr(RecurrentFamily, "state", lambda *_: UnchangedState())
    with engine(device, target, method="eagle3", draft=draft, enable_prefix_caching=False) as llm:
        wrong = differing(answers(llm, sizes), expected)
    assert len(wrong) > (8 if device == "cuda" else 0)


@pytest.mark.parametrize(
    ("device", "write"),
    params(nightly=[(write_falcon_h1,), (write_granite_hybrid,)], cuda=[(write_falcon_h1,)]),
    scope="module",
)
def test_mamba_2_without_a_draft_model(
    device: str,
    write: Callable[..., Path],
    sizes: Sizes,
    tmp_path: Path,
    learn: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """VLLM has no EAGLE for these models; n-grams, and here a table, draft for them."""
    target = write(tmp_path / "target", **sizes.mamba)
    more = {"enable_prefix_caching": False}
    with engine(device, target, **more) as llm:
        expected = answers(llm, sizes)
    learn(expected)
    with engine(device, target, method="ngram_gpu", **more) as llm:
        assert differing(answers(llm, sizes), expected) == []
        if device == "cuda":
            check_parts(llm, device)
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / (2 if device == "cuda" else 1)
    # Negative control: what is accepted stays in the columns of its nodes.
    monkeypatch.setattr(RecurrentFamily, "state", lambda *_: UnchangedState())
    with engine(device, target, method="ngram_gpu", **more) as llm:
        wrong = differing(answers(llm, sizes), expected)
    assert len(wrong) > (8 if device == "cuda" else 0)


# --- on a device alone --------------------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("form", ["inputs", "states"])
@ON_CUDA
def test_answers_in_bfloat16(
    device: str, form: str, dense: bool, target: Path, draft: Path, sizes: Sizes, tmp_path: Path,
    learn: Any,
) -> None:  # fmt: skip
    """Dense is Qwen3.5's text model, whose own module often drafts what it says."""
    if dense:
        target = write_text_qwen3_5(tmp_path, **sizes.delta)
    with engine(device, target, dtype="bfloat16") as llm:
        expected = with_logprobs(llm, sizes.prompts, sizes.tokens)
    learn(expected)
    trees: dict[str, Any] = {"method": "mtp"} if dense else {"method": "eagle3", "draft": draft}
    with engine(device, target, dtype="bfloat16", form=form, **trees) as llm:
        found = with_logprobs(llm, sizes.prompts, sizes.tokens)
        check_parts(llm, device, form)
        kinds = [
            type(each).__name__ for each in (model_runner(llm).model, model_runner(llm).speculator)
        ]
        metrics = spec_metrics(llm)
    check_near_ties(found, expected, NEAR)
    if dense:
        assert kinds == ["Qwen3_5ForCausalLM", "MtpTrees"]
        assert metrics.accepted_tokens > metrics.drafts / 10


@ON_CUDA
def test_images_in_float32(device: str, sizes: Sizes, tmp_path: Path) -> None:
    """Qwen3.5 as it is served: M-RoPE positions of trees in graphs and beside prompts."""
    target = write_served_qwen3_5(tmp_path, **sizes.delta)
    images = [(64, 96), (96, 64)]
    requests: list[Any] = [
        image_request("What is it? " * (seed + 1), images[: 1 + seed % 2], seed)
        for seed in range(16)
    ]
    more: dict[str, Any] = {
        "skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2, "video": 0},
        "mm_processor_cache_gb": 0,
    }  # fmt: skip
    with engine(device, target, **more) as llm:
        expected = greedy(llm, requests, sizes.tokens)
    assert len({tuple(tokens) for tokens in expected}) > 8
    with engine(device, target, method="mtp", **more) as llm:
        assert differing(greedy(llm, requests, sizes.tokens), expected) == []
        assert model_runner(llm).model_state.rope_state is not None
        check_parts(llm, device)
        with rows_at_their_slots():
            assert differing(greedy(llm, requests, sizes.tokens), expected)
