"""Real engines: a tree must change how fast tokens come, never which tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engines.pairs import (
    Answer,
    Pair,
    Request,
    answer_all,
    counter,
    differing,
    scheduling,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("nodes", "topk", "steps"), [(31, 8, 6), pytest.param(63, 4, 7, marks=pytest.mark.nightly)]
)
def test_tokens_are_those_of_the_target_alone(
    pair: Pair, samples: list[Request], expected: list[Answer], nodes: int, topk: int, steps: int
) -> None:
    from vllm_graft.testing import spec_metrics

    options: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 512}
    with pair.engine(nodes=nodes, topk=topk, steps=steps, **options) as llm:
        assert not differing(answer_all(llm, samples[:6]), expected[:6])
        assert spec_metrics(llm).acceptance_length > 1.5


def test_tokens_hold_when_crowded(
    pair: Pair, samples: list[Request], expected: list[Answer]
) -> None:
    """Chunked prefill, prefix caching, async scheduling and preemption, all at once."""
    crowded: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 72,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": 14,
        "async_scheduling": True,
    }
    with pair.engine(nodes=15, **crowded) as llm:
        core: Any = llm.llm_engine.engine_core
        assert type(core.engine_core.scheduler).__name__ == "AsyncScheduler"
        del core
        with scheduling(llm) as seen:
            assert not differing(answer_all(llm, samples), expected)
        assert seen.prompt_chunks > 0
        assert seen.chunks_beside_drafts > 0
        assert seen.preempted > 0
        assert counter(llm, "vllm:prefix_cache_hits") > 0


def test_without_compaction_tokens_differ(
    pair: Pair,
    samples: list[Request],
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: the accepted path's K/V stays where the tree left it."""
    from vllm_graft.spec_decode.targets.dense import dense_family

    monkeypatch.setattr(dense_family, "compact_kv", lambda *args, **kwargs: None)
    with pair.engine(nodes=15) as llm:
        assert differing(answer_all(llm, samples[:4]), expected[:4])


def test_without_mask_tokens_differ(
    pair: Pair,
    samples: list[Request],
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: every node sees every other one."""
    from vllm_graft.spec_decode.verification import context

    prepare_rows = context.prepare_rows

    def unmasked(*args: Any, **kwargs: Any) -> None:
        prepare_rows(*args, **kwargs)
        args[3].row_masks.fill_(-1)

    monkeypatch.setattr(context, "prepare_rows", unmasked)
    with pair.engine(nodes=15) as llm:
        assert differing(answer_all(llm, samples[:4]), expected[:4])


@pytest.mark.slow
def test_triton_kernels_serve_the_engine(
    pair: Pair, samples: list[Request], expected: list[Answer]
) -> None:
    """The path of a GPU runs without one: Triton kernels, recorded FULL graphs, padded batches."""
    short = [Request(each.prompt, {**each.params, "max_tokens": 8}) for each in samples[2:5]]
    # Two requests have 32 rows in the target, and 8 rows in a level of the draft.
    with pair.engine(nodes=15, attention="triton", graphs=[8, 16, 32], max_num_seqs=2) as llm:
        from vllm_graft.testing import model_runner

        found = [answer.tokens[0] for answer in answer_all(llm, short)]
        assert found == [answer.tokens[0][:8] for answer in expected[2:5]]
        runner = model_runner(llm)
        target = runner.cudagraph_manager.graphs.values()
        levels = runner.speculator.draft_graphs()
        assert sum(graph.replays for graph in target) > 0
        assert sum(graph.replays for graph in levels) > 0
        del runner, target, levels


def test_no_key_no_change(pair: Pair) -> None:
    """Stock vLLM runs without a graft key, though the plugin is installed."""
    with pair.engine(chain=3) as llm:
        from vllm_graft.testing import model_runner

        runner = model_runner(llm)
        names = {
            type(runner.speculator).__module__,
            type(runner.model_state).__module__,
            type(runner.rejection_sampler).__module__,
        }
        layers = runner.compilation_config.static_forward_context.values()
        names |= {type(layer.impl).__module__ for layer in layers}
        del runner, layers
        assert not [name for name in names if "graft" in name]
