"""Graphs of mixed batches: the ones that are planned, and the batches that they serve."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_graft.base.errors import ConfigError
from vllm_graft.graph_runners.language import mixed
from vllm_graft.graph_runners.language.mixed import mixed_sizes, plan_mixed, plan_mixed_graphs
from vllm_graft.spec_decode.tree_part import plan_graphs

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
WIDTH = 8


def make_manager(sizes: list[int], loras: list[int] | None = None, **changes: Any) -> Any:
    """Make vLLM's manager in its state after `_init_candidates`, without an engine."""
    manager: Any = object.__new__(CudaGraphManager)
    manager.max_num_reqs = 16
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager.decode_query_len = WIDTH
    manager.varlen_decode, manager.ubatch_runner = False, None
    manager.lora_capture_cases = loras or [0]
    manager._lora_dispatch_map, manager._max_lora_case = manager._build_lora_dispatch_map()
    manager._candidates, manager._capture_descs, manager.graphs = {}, {}, {}
    manager.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
    )
    manager.vllm_config = SimpleNamespace(
        additional_config={},
        speculative_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        model_config=SimpleNamespace(supports_multimodal_inputs=False),
        parallel_config=SimpleNamespace(enable_dbo=False),
    )
    vars(manager).update(changes)
    manager._init_candidates()
    manager._graphs_captured = True
    return manager


def dispatch(manager: Any, reqs: int, tokens: int, uniform: int | None = None) -> Any:
    found: BatchExecutionDescriptor = manager.dispatch(reqs, tokens, uniform, 0, uniform)
    return found


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1, 2, 4], []),
        ([8], [8]),
        ([1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64], [8, 16, 24, 32, 40, 48, 64]),
        ([512, 496, 480, 432, 400], [400, 512]),
    ],
)
def test_sizes(sizes: list[int], expected: list[int]) -> None:
    assert mixed_sizes(sizes) == expected


def test_mixed_batches_are_served_and_uniform_ones_as_before() -> None:
    sizes = [8, 16, 64, 128]
    stock, ours = make_manager(sizes), make_manager(sizes)
    plan_mixed(ours, [16, 64])
    planned = [desc for desc in ours._capture_descs[FULL] if desc.uniform_token_count is None]
    assert [(desc.num_tokens, desc.num_reqs) for desc in planned] == [(64, 16), (16, 16)]
    tokens = [desc.num_tokens for desc in ours._capture_descs[FULL]]
    assert tokens == sorted(tokens, reverse=True)
    for reqs in range(1, 17):
        alike = reqs, reqs * WIDTH, WIDTH
        assert dispatch(ours, *alike) == dispatch(stock, *alike)
    for count in range(2, 129):
        found = dispatch(ours, 2, count)
        assert dispatch(stock, 2, count).cg_mode is PIECEWISE
        if count <= 64:
            assert (found.cg_mode, found.num_tokens) == (FULL, 16 if count <= 16 else 64)
        else:
            assert found == dispatch(stock, 2, count)


def test_each_number_of_adapters_has_its_own() -> None:
    manager = make_manager([8, 64], loras=[0, 2])
    plan_mixed(manager, [64])
    for active, captured in [(0, 0), (1, 2), (2, 2)]:
        found = manager.dispatch(3, 20, None, active, None)
        assert (found.cg_mode, found.num_tokens, found.num_active_loras) == (FULL, 64, captured)


def layer(support: AttentionCGSupport) -> Any:
    builder = SimpleNamespace(get_cudagraph_support=lambda config, spec: support)
    backend = SimpleNamespace(get_name=lambda: "SOME_ATTN", get_builder_cls=lambda: builder)
    return SimpleNamespace(
        get_kv_cache_spec=lambda config: SimpleNamespace(), get_attn_backend=lambda: backend
    )


def plan(monkeypatch: Any, asked: bool | None, **changes: Any) -> int:
    """Plan, and return the number of graphs of mixed batches."""
    support = changes.pop("support", AttentionCGSupport.ALWAYS)
    monkeypatch.setattr(mixed, "get_layers_from_vllm_config", lambda *_: {"l.0": layer(support)})
    model = {"supports_multimodal_inputs": changes.pop("multimodal", False)}
    manager = make_manager(changes.pop("sizes", [8, 64]), **changes)
    vars(manager.vllm_config.model_config).update(model)
    plan_mixed_graphs(manager, asked, "graft.tree.mixed_graphs")
    return sum(desc.uniform_token_count is None for desc in manager._capture_descs.get(FULL, []))


def test_where_vllm_captures_mixed_batches_piecewise(monkeypatch: Any) -> None:
    only = {"cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY}
    assert plan(monkeypatch, None) == 2
    assert plan(monkeypatch, False) == 0
    assert plan(monkeypatch, None, **only) == 0
    assert plan(monkeypatch, True, **only) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"support": AttentionCGSupport.UNIFORM_BATCH}, "SOME_ATTN of layer l.0 captures UNIFORM"),
        ({"max_num_reqs": 1}, "--max-num-seqs is 1"),
        ({"multimodal": True}, "the model takes images"),
        ({"cudagraph_mode": CUDAGraphMode.NONE}, r"compilation_config\.cudagraph_mode came out as"),
        ({"sizes": [1, 4]}, r"compilation_config\.cudagraph_capture_sizes \[1, 4\] has no size"),
    ],
)
def test_where_it_is_impossible(monkeypatch: Any, changes: dict[str, Any], words: str) -> None:
    assert plan(monkeypatch, None, **changes) == 0
    with pytest.raises(ConfigError, match=f"tree.mixed_graphs is true, but {words}"):
        plan(monkeypatch, True, **changes)


def widths_under_auto(rows: int) -> set[int]:
    """Widths that a manager of so many rows per request plans where trees have up to 7 nodes."""
    ranges = [(1, 2, 7), (3, 4, 3), (5, 16, 0)]
    manager = make_manager(
        [8, 16, 64, 128],
        decode_query_len=rows,
        vllm_config=SimpleNamespace(
            additional_config={"graft": {"tree": {"shape": "auto"}}},
            num_speculative_tokens=7,
            scheduler_config=SimpleNamespace(max_num_seqs=16),
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=128),
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
            speculative_config=SimpleNamespace(
                num_speculative_tokens=7,
                num_speculative_tokens_per_batch_size=ranges,
                uses_dynamic_speculative_decoding=lambda: True,
            ),
        ),
    )
    plan_graphs(manager, of_target=False)
    return {desc.uniform_token_count for desc in manager._capture_descs[FULL]}


def test_graphs_of_a_draft_model_s_first_pass_stay() -> None:
    """It has a row more than the target, so that its largest batches are of 9 rows a request."""
    assert widths_under_auto(WIDTH) == {1, 4, 8}
    assert widths_under_auto(WIDTH + 1) == {2, 5, 9}
