"""Reports of the scheduler's steps to the tuner."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from vllm_graft.spec_decode.chunking.graph_fit import LEAST_ROWS, ROWS, cut_trees
from vllm_graft.spec_decode.tuning import scheduling
from vllm_graft.spec_decode.tuning.copied_texts import EVERY
from vllm_graft.spec_decode.tuning.rank_agreement import Heard
from vllm_graft.spec_decode.tuning.scheduling import StepWatch, TunedLookup, tune
from vllm_graft.spec_decode.tuning.tuner import NodeTuner


class Told:
    """A stand-in for a tuner that records its calls."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[int], float | None]] = []
        self.besides: list[tuple[int, int]] = []
        self.same: list[bool] = []
        self.temperatures: list[float] = []
        self.contexts: list[int] = []
        self.verified: list[int] = []
        self.copied = 0
        self.heard: list[int] = []

    def heed(self, copied: int) -> None:
        self.heard.append(copied)

    def knows(self, nodes: int) -> bool:
        return True

    def observe(
        self,
        nodes: int,
        emitted: list[int],
        seconds: float | None,
        *,
        batch: int,
        prompts: int,
        verified: int,
        same: bool,
        temperature: float,
        context: int,
    ) -> None:
        self.contexts.append(context)
        self.verified.append(verified)
        self.same.append(same)
        self.temperatures.append(temperature)
        self.steps.append((nodes, emitted, seconds))
        self.besides.append((batch, prompts))


def step(
    drafts: dict[str, int], next_drafts: int, extra: int = 0, prompts: dict[str, int] | None = None
) -> Any:
    """Make a scheduler's output: drafts by request, drafts of the next step, tokens of prompts."""
    decodes = {name: count + 1 + extra for name, count in drafts.items()}
    return SimpleNamespace(
        num_scheduled_tokens={**(prompts or {}), **decodes},
        scheduled_spec_decode_tokens={n: [-1] * count for n, count in drafts.items() if count},
        num_spec_tokens_to_schedule=next_drafts,
    )


@pytest.fixture
def watch() -> Any:
    return StepWatch(Told(), {})  # type: ignore[arg-type]


def test_temperature_and_context_of_the_requests_are_told() -> None:
    hot, cool = (
        SimpleNamespace(sampling_params=SimpleNamespace(temperature=t), num_computed_tokens=n)
        for t, n in ((1, 300), (0.5, 70))
    )
    pooled = SimpleNamespace(sampling_params=None, num_computed_tokens=9)
    requests: Any = {"a": hot, "b": cool, "c": pooled}
    watch: Any = StepWatch(Told(), requests)  # type: ignore[arg-type]
    watch.ended(step({"a": 7, "b": 7}, 7), {"a": [1], "b": [3]}, 1.0)
    watch.ended(step({"a": 7, "c": 7}, 7), {"a": [1], "c": [3]}, 2.0)
    # They are aborted after the step was scheduled, as may happen with asynchronous scheduling.
    del requests["a"], requests["c"]
    watch.ended(step({"a": 7, "c": 7}, 7), {"a": [1], "c": [3]}, 3.0)
    watch.ended(step({"a": 7, "b": 7}, 7), {"a": [1], "b": [3]}, 4.0)
    assert watch.tuner.temperatures == [0.75, 1.0, 1.0, 0.5]
    assert watch.tuner.contexts == [370, 309, 309, 309]
    requests["a"] = hot
    watch.ended(step({"a": 7, "b": 7}, 7), {"a": [1], "b": [3]}, 5.0)
    assert watch.tuner.contexts[-1] == 370


def test_only_steps_alike_are_timed(watch: Any) -> None:
    same = {"a": 7, "b": 7}
    watch.ended(step(same, 7), {"a": [1, 2], "b": [3]}, 1.0)
    watch.ended(step(same, 7), {"b": [2, 3, 4], "a": [1]}, 1.5)
    # The next step drafts another number: its draft passes may be part of this step's time.
    watch.ended(step(same, 3), {"a": [1], "b": [2]}, 2.0)
    watch.ended(step({"a": 3, "b": 3}, 3), {"a": [1], "b": [2]}, 2.5)
    watch.ended(step({"a": 3, "b": 3}, 3), {"a": [1], "b": [2]}, 2.75)
    assert watch.tuner.steps == [
        (7, [2, 1], None),
        (7, [1, 3], 0.5),
        (7, [1, 1], None),
        (3, [1, 1], None),
        (3, [1, 1], 0.25),
    ]
    assert watch.tuner.besides == [(2, 0)] * 5


def test_prompts_beside_decodes_are_told(watch: Any) -> None:
    watch.ended(step({"a": 7}, 7), {"a": [1, 2]}, 1.0)
    watch.ended(step({"a": 7}, 7, prompts={"p": 50}), {"p": [9], "a": [1, 2, 3]}, 1.5)
    # A chunk of a prompt emits nothing.
    watch.ended(step({"a": 7}, 7, prompts={"p": 50, "q": 8}), {"a": [1]}, 2.25)
    assert watch.tuner.steps == [(7, [2], None), (7, [3], 0.5), (7, [1], 0.75)]
    assert watch.tuner.besides == [(1, 0), (2, 50), (3, 58)]


def test_steps_of_cut_trees_are_timed_as_those_of_whole_ones(watch: Any) -> None:
    watch.ended(step({"a": 7, "b": 7}, 7), {"a": [1, 2], "b": [1]}, 1.0)
    beside = step({"a": 7, "b": 7}, 7, prompts={"p": 50})
    beside.total_num_scheduled_tokens = 66
    cut_trees(beside, 60)
    watch.ended(beside, {"p": [9], "a": [1, 2, 3], "b": [1]}, 1.5)
    watch.ended(step({"a": 7, "b": 7}, 7), {"a": [1, 2], "b": [1]}, 2.0)
    assert watch.tuner.steps == [(7, [2, 1], None), (7, [3, 1], 0.5), (7, [2, 1], 0.5)]
    assert watch.tuner.besides == [(2, 0), (3, 50), (2, 0)]
    assert watch.tuner.verified == [7, 4, 7]


def test_other_requests_are_told(watch: Any) -> None:
    for names in ("a", "a", "b", "ab", "abcd", "abcx", "uvwx"):
        watch.ended(step(dict.fromkeys(names, 7), 7), {name: [1] for name in names}, 1.0)
    assert watch.tuner.same == [False, True, False, True, True, True, False]


def test_steps_of_several_numbers_say_nothing(watch: Any) -> None:
    watch.ended(step({"a": 7, "b": 3}, 7), {"a": [1, 2], "b": [3]}, 1.0)
    watch.ended(step({"a": 0}, 7, extra=30), {"a": [1]}, 1.1)
    watch.ended(step({"a": 7, "b": 7}, 7), {"a": [1], "b": []}, 1.2)
    watch.ended(step({"a": 7}, 7), {}, 1.3)
    assert watch.tuner.steps == []


def test_a_tree_that_was_cut_says_nothing() -> None:
    """vLLM cuts a tree at the end of the context, to a number that is never chosen."""
    watch = StepWatch(NodeTuner([0, 7, 3], max_rows=64), {})
    watch.ended(step({"a": 7}, 7), {"a": [1, 2]}, 1.0)
    seen = watch.tuner._acceptance._seen[7]
    missed = seen.missed
    watch.ended(step({"a": 5}, 7), {"a": [1, 2]}, 1.1)
    assert seen.missed == missed
    watch.ended(step({"a": 7}, 7), {"a": [1, 2, 3]}, 1.2)
    assert seen.missed > missed


def test_steps_without_drafts_count(watch: Any) -> None:
    watch.ended(step({"a": 0}, 0), {"a": [5]}, 1.0)
    watch.ended(step({"a": 0}, 0), {"a": [5]}, 1.25)
    watch.ended(step({"a": 0}, 0, prompts={"p": 9}), {"a": [5], "p": [6]}, 1.75)
    assert watch.tuner.steps == [(0, [1], None), (0, [1], 0.25), (0, [1], 0.5)]
    assert watch.tuner.besides == [(1, 0), (1, 0), (2, 9)]


def test_a_text_that_copies_itself_is_told_while_nothing_is_drafted() -> None:
    text = [1, 2, 3, 4, 5, 9, 9, 9, 1, 2, 3, 4, 5]
    request = SimpleNamespace(all_token_ids=text, sampling_params=None, num_computed_tokens=9)
    watch: Any = StepWatch(Told(), {"a": request})  # type: ignore[arg-type, dict-item]
    for copied, nodes, heard in ((0, 0, 0), (4, 7, 0), (4, 0, 4), (9, 0, 5)):
        watch.tuner.copied = copied
        watch.tuner.heard.clear()
        for number in range(EVERY):
            watch.ended(step({"a": nodes}, nodes), {"a": [1]}, float(number))
        assert max(watch.tuner.heard, default=0) == heard


def make_scheduler(tree: str, replicas: int = 1) -> Any:
    config = SimpleNamespace(
        additional_config={"graft": {"tree": {"shape": tree}}},
        model_config=SimpleNamespace(is_moe=replicas > 1),
        parallel_config=SimpleNamespace(data_parallel_size=replicas),
        scheduler_config=SimpleNamespace(max_num_seqs=8, disable_chunked_mm_input=False),
        compilation_config=SimpleNamespace(
            max_cudagraph_capture_size=64, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
        ),
        speculative_config=SimpleNamespace(
            method="eagle3",
            num_speculative_tokens=15,
            num_speculative_tokens_per_batch_size=[(1, 2, 15), (3, 8, 3)],
            uses_dynamic_speculative_decoding=lambda: True,
            target_model_config=SimpleNamespace(is_moe=False),
        ),
    )
    return SimpleNamespace(
        vllm_config=config,
        requests={},
        dynamic_sd_lookup=[0, 15, 15, 3, 3, 3, 3, 3, 3],
        update_from_output=lambda scheduler_output, model_runner_output: "stock's",
        schedule=lambda: None,
        need_mamba_block_aligned_split=False,
        _update_after_schedule=lambda scheduler_output: None,
        _build_kv_connector_meta=lambda connector, scheduler_output: None,
    )


def test_a_scheduler_is_tuned_if_asked_for() -> None:
    scheduler = make_scheduler("fixed")
    tune(scheduler)
    assert type(scheduler.dynamic_sd_lookup) is list
    scheduler = make_scheduler("auto")
    tune(scheduler)
    lookup = scheduler.dynamic_sd_lookup
    assert isinstance(lookup, TunedLookup)
    assert isinstance(lookup.tuner, NodeTuner)
    assert lookup[1] == 15
    # 8 trees of 16 rows are more than the largest graph has.
    assert lookup[8] == 3
    output = SimpleNamespace(req_ids=["a"], sampled_token_ids=[[1, 2]])
    for _ in range(2):
        assert scheduler.update_from_output(step({"a": 15}, 15), output) == "stock's"
    assert lookup.tuner._acceptance._seen[15].missed == pytest.approx(2.0, rel=1e-3)
    assert lookup.tuner.times.predict(1, 15)


def test_ranks_that_share_experts_plan_for_the_largest_batch() -> None:
    scheduler = make_scheduler("fixed", replicas=2)
    tune(scheduler)
    scheduler.dynamic_sd_lookup.heard = Heard(wish=3, requests=8)
    assert (scheduler.dynamic_sd_lookup[1], scheduler.dynamic_sd_lookup.wish) == (3, 3)
    scheduler = make_scheduler("auto", replicas=2)
    tune(scheduler)
    lookup = scheduler.dynamic_sd_lookup
    lookup.heard = Heard(wish=15, requests=8)
    # 8 trees of 16 rows are more than the largest graph has: only the other rank wishes them.
    assert (lookup[1], lookup.wish) == (15, 3)
    output = SimpleNamespace(req_ids=["a"], sampled_token_ids=[[1, 2]])
    for _ in range(2):
        assert scheduler.update_from_output(step({"a": 15}, 15), output) == "stock's"
    assert lookup.tuner.times.predict(8, 15)
    assert not lookup.tuner.times.predict(1, 15)


@pytest.mark.parametrize("experts", [False, True])
def test_costs_are_corrected_by_a_slope_only_where_there_are_experts(
    experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []

    class Noted(NodeTuner):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            told.append(kwargs["experts"])
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(scheduling, "NodeTuner", Noted)
    scheduler = make_scheduler("auto")
    # The head (EAGLE-3) is dense.
    scheduler.vllm_config.speculative_config.target_model_config.is_moe = experts
    tune(scheduler)
    assert told == [experts]


def test_trees_are_cut_only_where_that_saves_a_graph() -> None:
    """Nothing is cut unasked, nor where no step with prompts has a graph anyway."""
    given: list[tuple[dict[str, Any], str, bool]] = [
        ({}, "FULL_AND_PIECEWISE", True),
        ({"fit_graphs": False}, "FULL_AND_PIECEWISE", False),
        ({}, "FULL_DECODE_ONLY", False),
        ({"mixed_graphs": True}, "FULL_DECODE_ONLY", True),
    ]
    for keys, mode, cuts in given:
        scheduler = make_scheduler("auto")
        scheduler.vllm_config.additional_config["graft"]["tree"] |= keys
        scheduler.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
        stock = scheduler._update_after_schedule
        tune(scheduler)
        assert (scheduler._update_after_schedule is not stock) is cuts
        assert scheduler.dynamic_sd_lookup.tuner._cuts is cuts


def test_prompts_are_chunked_only_for_graphs_that_workers_have_captured() -> None:
    given: list[tuple[dict[str, Any], int | None, bool, bool]] = [
        ({}, 512, True, True),
        ({"shape": "fixed"}, 512, True, True),
        ({"fit_prompts": False}, 512, True, False),
        ({}, None, True, False),
        ({}, 0, True, False),
        # Half of such a graph has no room for a prompt of one token with all of its drafts.
        ({}, LEAST_ROWS - 1, True, False),
        ({}, 512, False, False),
    ]
    for keys, rows, can_chunk, chunks in given:
        scheduler = make_scheduler("auto")
        scheduler.vllm_config.additional_config["graft"]["tree"] |= keys
        scheduler.vllm_config.scheduler_config.enable_chunked_prefill = can_chunk
        if rows is not None:
            ROWS.keep(scheduler.vllm_config, rows)
        stock = scheduler.schedule
        tune(scheduler)
        assert (scheduler.schedule is not stock) is chunks, keys
        assert ROWS.take(scheduler.vllm_config) is None
