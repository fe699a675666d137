"""Trees on targets with recurrent layers, on a device: FULL graphs, mixed batches, prefixes.

Heads have their true sizes, and states are float32. In float32 answers have to be those of the
target. VLLM's kernels of the gated delta rule for prompts need 16 bits: there a plain loop stands
in for them, with and without trees. In bfloat16 they run as they are; there a decode and the rows
of a tree are rounded otherwise, so answers may part where two tokens are about equally probable,
and nowhere else.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.answers.near_ties import Answer as Logged
from tests.support.answers.near_ties import answers as with_logprobs
from tests.support.answers.near_ties import check_near_ties, departures
from tests.support.answers.text_requests import both_kinds
from tests.support.engines.gpu_engines import exact_engine
from tests.support.engines.pairs import counter
from tests.support.engines.recurrent_layers import exact_prompts
from tests.support.models.recurrent_models import (
    VOCABULARY,
    draft_shape,
    write_falcon_h1,
    write_nemotron_h,
    write_qwen3_next,
)
from tests.support.models.served_qwen import (
    image_request,
    rows_at_their_slots,
    write_served_qwen3_5,
    write_text_qwen3_5,
)
from vllm_graft.spec_decode.targets.families import UnchangedState
from vllm_graft.spec_decode.targets.recurrent import recurrent_family
from vllm_graft.spec_decode.targets.recurrent.delta_layer import TreeDeltaRule
from vllm_graft.spec_decode.targets.recurrent.mamba_layer import TreeSelectiveState
from vllm_graft.spec_decode.targets.recurrent.recurrent_family import RecurrentFamily
from vllm_graft.testing import greedy, model_runner, spec_metrics, write_eagle3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("untuned"),
]

HIDDEN, NODES, TOKENS = 256, 7, 24
NEAR = 0.5
"""Largest gap of log-probabilities that rounding to bfloat16 explains."""

_RANDOM = random.Random(0)
PROMPTS = [
    [_RANDOM.randrange(2, VOCABULARY) for _ in range(_RANDOM.choice([1, 3, 17, 40, 90, 300]))]
    for _ in range(32)
]
"""More than run at once, so that prompts meet trees; some are longer than a step's tokens."""

LONG, LONG_TOKENS = [_RANDOM.randrange(2, VOCABULARY) for _ in range(540)], 420
"""A prompt that does not fill three blocks of about 300 tokens, and tokens that do."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder: Path = tmp_path_factory.mktemp("recurrent")
    target = write_qwen3_next(folder / "target", heads=(2, 4), head=128, hidden=HIDDEN)
    draft = write_eagle3(folder / "draft", draft_shape(HIDDEN))
    return str(target), str(draft)


@contextmanager
def engine(
    models: tuple[str, str],
    *,
    method: str = "",
    dtype: str = "float32",
    form: str = "auto",
    **options: Any,
) -> Iterator[Any]:
    """An engine without drafts, or with trees from the table or, with ``mtp``, from the module."""
    target, draft = models
    given: dict[str, Any] = {"gdn_prefill_backend": "triton"}
    if method:
        speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": NODES}
        tree: dict[str, Any] = {"topk": 2, "steps": 4, "recurrent": True, "recurrent_form": form}
        if method == "eagle3":
            speculative["model"], tree["drafter"] = draft, "table"
        elif method == "ngram_gpu":
            speculative |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
            tree["drafter"] = "table_alone"
        options["speculative_config"] = speculative
        given["graft"] = {"tree": tree}
    usual: dict[str, Any] = {
        "dtype": dtype, "additional_config": given, "mamba_ssm_cache_dtype": "float32",
        "skip_tokenizer_init": True, "max_model_len": 2048, "max_num_batched_tokens": 256,
        "enable_prefix_caching": False, "kv_cache_memory_bytes": 2**30,
    }  # fmt: skip
    with exact_engine(target, drafts=NODES, **usual | options) as llm:
        yield llm


def check_parts(llm: Any) -> None:
    """Trees ran, in graphs and beside prompts, on every recurrent layer."""
    runner = model_runner(llm)
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    cores = [
        getattr(layer, name, None)
        for layer in layers
        for name in ("_forward_core", "conv_ssm_forward")
    ]
    assert sum(isinstance(core, (TreeDeltaRule, TreeSelectiveState)) for core in cores) == 2
    counters = runner.speculator.context.counters
    print(f"counters: {counters}, {spec_metrics(llm)}")
    assert counters.tree_replays > 0
    assert counters.mixed_launches > 0


def check_form(llm: Any, form: str) -> None:
    """Layers have memory for inputs where they keep them."""
    kept = model_runner(llm).speculator.context.kept_bytes
    assert bool(kept) is (form == "inputs")


def different(
    found: list[list[int]], expected: list[list[int]], alone: Sequence[Logged] = ()
) -> list[int]:
    """Requests whose answers differ; where greedy ones part is printed, with the gap there."""
    if alone:
        greedy_ones = [Logged(tokens, []) for tokens in found[: len(alone)]]
        print(f"parted: {departures(greedy_ones, alone)}")
    return [place for place, pair in enumerate(zip(found, expected)) if pair[0] != pair[1]]


class Expected(NamedTuple):
    """What the target answers alone, in float32: greedy and seeded, with gaps, and at length."""

    both: list[list[int]]
    alone: list[Logged]
    long: list[int]


@pytest.fixture(scope="module")
def expected(models: tuple[str, str]) -> Expected:
    with exact_prompts(), engine(models, enable_prefix_caching=True) as llm:
        both = both_kinds(llm, PROMPTS, TOKENS)
        # The prompts meet other ones here, and the target's answers have to be the same.
        alone = with_logprobs(llm, PROMPTS, TOKENS)
        [long] = greedy(llm, [LONG], LONG_TOKENS)
    assert different(both, [each.tokens for each in alone], alone) == []
    return Expected(both, alone, long)


@pytest.fixture
def table(expected: Expected, learn: Any) -> None:
    learn([*expected.both, expected.long])


FORMS = ("inputs", "states")


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("form", FORMS)
def test_answers_in_float32(form: str, models: tuple[str, str], expected: Expected) -> None:
    """64 requests, and one whose states move on from block to block and are found again."""
    both, alone, long = expected
    with (
        exact_prompts(),
        engine(models, method="eagle3", form=form, enable_prefix_caching=True) as llm,
    ):
        config = model_runner(llm).vllm_config.cache_config
        block = config.block_size
        assert config.mamba_cache_mode == "align"
        assert len(LONG) < 3 * block < len(LONG) + LONG_TOKENS - 8
        assert different(both_kinds(llm, PROMPTS, TOKENS), both, alone) == []
        assert greedy(llm, [LONG], LONG_TOKENS) == [long]
        before = counter(llm, "vllm:prefix_cache_hits")
        for _ in range(2):
            assert greedy(llm, [LONG + long[:-8]], 8) == [long[-8:]]
        assert counter(llm, "vllm:prefix_cache_hits") >= before + 2 * block
        check_parts(llm)
        check_form(llm, form)
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 2


@pytest.mark.parametrize("form", FORMS)
def test_the_target_s_own_module_in_float32(
    form: str, models: tuple[str, str], expected: Expected
) -> None:
    """Its weights are random, so that nearly all that it drafts is wrong."""
    both, alone, _ = expected
    with exact_prompts(), engine(models, method="mtp", form=form) as llm:
        assert different(both_kinds(llm, PROMPTS, TOKENS), both, alone) == []
        assert type(model_runner(llm).speculator).__name__ == "MtpTrees"
        check_parts(llm)
        check_form(llm, form)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("form", FORMS)
def test_answers_differ_without_a_commit(
    form: str, models: tuple[str, str], expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls: accepted states stay in the columns of their nodes, or a state is
    continued by the first rows, whatever was accepted."""
    stock = recurrent_family.fold_states

    def first_rows(folds: Any, kept: Any, starts: Any, path: Any, *args: Any, **kw: Any) -> None:
        chain = torch.arange(path.shape[1], dtype=path.dtype, device=path.device)
        stock(folds, kept, starts, chain.expand_as(path).contiguous(), *args, **kw)

    if form == "inputs":
        monkeypatch.setattr(recurrent_family, "fold_states", first_rows)
    else:
        monkeypatch.setattr(RecurrentFamily, "state", lambda *_: UnchangedState())
    with exact_prompts(), engine(models, method="eagle3", form=form) as llm:
        assert len(different(both_kinds(llm, PROMPTS, TOKENS), expected.both)) > 8


@pytest.mark.parametrize("form", FORMS)
def test_answers_in_bfloat16(form: str, models: tuple[str, str], learn: Any) -> None:
    with engine(models, dtype="bfloat16") as llm:
        expected = with_logprobs(llm, PROMPTS, TOKENS)
    learn(expected)
    with engine(models, method="eagle3", dtype="bfloat16", form=form) as llm:
        found = with_logprobs(llm, PROMPTS, TOKENS)
        check_parts(llm)
        check_form(llm, form)
    check_near_ties(found, expected, NEAR)


@pytest.mark.parametrize("form", FORMS)
def test_a_dense_target_and_its_module_in_bfloat16(form: str, tmp_path: Path) -> None:
    """Qwen3.5's text model, whose module often drafts what it says."""
    target = write_text_qwen3_5(tmp_path, heads=(2, 4), head=128, hidden=HIDDEN)
    models = str(target), ""
    with engine(models, dtype="bfloat16") as llm:
        expected = with_logprobs(llm, PROMPTS, TOKENS)
    with engine(models, method="mtp", dtype="bfloat16", form=form) as llm:
        found = with_logprobs(llm, PROMPTS, TOKENS)
        assert type(model_runner(llm).model).__name__ == "Qwen3_5ForCausalLM"
        assert type(model_runner(llm).speculator).__name__ == "MtpTrees"
        check_parts(llm)
        check_form(llm, form)
        metrics = spec_metrics(llm)
    check_near_ties(found, expected, NEAR)
    assert metrics.accepted_tokens > metrics.drafts / 10


def test_images_in_float32(tmp_path: Path) -> None:
    """Qwen3.5 as it is served: M-RoPE positions of trees in graphs and beside prompts."""
    target = write_served_qwen3_5(tmp_path, heads=(2, 4), head=128, hidden=HIDDEN)
    models, sizes = (str(target), ""), [(64, 96), (96, 64)]
    requests: list[Any] = [
        image_request("What is it? " * (seed + 1), sizes[: 1 + seed % 2], seed)
        for seed in range(16)
    ]
    more: dict[str, Any] = {
        "skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 2, "video": 0},
        "mm_processor_cache_gb": 0,
    }  # fmt: skip
    with exact_prompts(), engine(models, **more) as llm:
        expected = greedy(llm, requests, TOKENS)
    assert len({tuple(tokens) for tokens in expected}) > 8
    with exact_prompts(), engine(models, method="mtp", **more) as llm:
        assert different(greedy(llm, requests, TOKENS), expected) == []
        assert model_runner(llm).model_state.rope_state is not None
        check_parts(llm)
        with rows_at_their_slots():
            assert different(greedy(llm, requests, TOKENS), expected)


@pytest.mark.parametrize("form", FORMS)
def test_mamba_2_in_float32(
    form: str, tmp_path: Path, learn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_nemotron_h(tmp_path / "target", heads=4, head=64, state=128, hidden=HIDDEN)
    draft = write_eagle3(tmp_path / "draft", draft_shape(HIDDEN, layers=6))
    models = str(target), str(draft)
    with engine(models, enable_prefix_caching=True) as llm:
        expected = both_kinds(llm, PROMPTS, TOKENS)
    learn(expected)
    with engine(models, method="eagle3", form=form, enable_prefix_caching=True) as llm:
        assert model_runner(llm).vllm_config.cache_config.mamba_cache_mode == "align"
        assert different(both_kinds(llm, PROMPTS, TOKENS), expected) == []
        check_parts(llm)
        check_form(llm, form)
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 2
    # Negative control: what is accepted stays in the columns of its nodes.
    monkeypatch.setattr(RecurrentFamily, "state", lambda *_: UnchangedState())
    with engine(models, method="eagle3") as llm:
        assert len(different(both_kinds(llm, PROMPTS, TOKENS), expected)) > 8


def test_mamba_2_without_a_draft_model(
    tmp_path: Path, learn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falcon-H1, for which vLLM has no EAGLE: attention and Mamba-2 side by side in each layer."""
    target = write_falcon_h1(tmp_path / "target", heads=4, head=64, state=128, hidden=HIDDEN)
    models = str(target), ""
    with engine(models) as llm:
        expected = both_kinds(llm, PROMPTS, TOKENS)
    learn(expected)
    with engine(models, method="ngram_gpu") as llm:
        assert different(both_kinds(llm, PROMPTS, TOKENS), expected) == []
        check_parts(llm)
        metrics = spec_metrics(llm)
    assert metrics.accepted_tokens > metrics.drafts / 2
    # Negative control: what is accepted stays in the columns of its nodes.
    monkeypatch.setattr(RecurrentFamily, "state", lambda *_: UnchangedState())
    with engine(models, method="ngram_gpu") as llm:
        assert len(different(both_kinds(llm, PROMPTS, TOKENS), expected)) > 8
