"""Recorded graphs of vLLM's towers: a replay only runs operators, in a poisoned pool.

So a captured region fails here if it reads a device value on the host, keeps memory of the pool, or
reads other tensors than the static buffers.
"""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import cuda_graphs
from tests.support.cuda_graphs import recording
from tests.support.vision import standins, towers
from tests.support.vision.fake_backend import FakeBackend
from vllm_graft.graph_runners.vision.capture.graph_backend import Captured, Region
from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner


class RecordingBackend(FakeBackend):
    reads_device = False

    def capture(self, region: Region) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=(0, 7)):
            output = region()
        return Captured(graph, output)


@pytest.fixture
def recorded(model: Any) -> Iterator[ViTCudaGraphRunner]:
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for layer in model.modules():
        if isinstance(layer, MMEncoderAttention):
            layer.attn_backend = AttentionBackendEnum.FLASH_ATTN
            layer._forward_method = functools.partial(standins.attend, layer)
    model.visual.attn_backend = AttentionBackendEnum.FLASH_ATTN
    options = {"max_patches": 256, "buckets": [128, 256], "capture_share": 1}
    with recording():
        runner = towers.runner_of(model, towers.make_config(options), RecordingBackend)
        runner.capture("pool")
        yield runner


def test_recorded_replays_are_the_eager_pass(kind: str, recorded: Any) -> None:
    for seed in range(3):
        for grids, modality in (
            ([(1, 8, 8)], "image"),
            ([(1, 4, 16)], "image"),
            ([(1, 8, 8), (1, 6, 8), (1, 2, 2)], "image"),
            ([(5, 4, 4)], "video"),
        ):
            assert towers.right(recorded, towers.batch(kind, grids, modality, seed))
    report = recorded.report()
    assert report["failures"] == []
    assert report["items"]["exact"] >= 4
    assert report["items"]["bucket"] >= 8


def test_a_region_that_reads_the_device_is_not_captured(
    kind: str, recorded: Any, monkeypatch: Any
) -> None:
    forward = recorded.tower.forward

    def peeking(buffers: Any) -> Any:
        float(buffers["pixel_values"].sum())
        return forward(buffers)

    monkeypatch.setattr(recorded.tower, "forward", peeking)
    recorded.clear()
    recorded.capture("pool")
    report = recorded.report()
    assert report["graphs"] == {"exact": 0, "bucket": 0}
    assert report["dropped"] == {"error": 2}
    assert cuda_graphs.CaptureError.__name__ in report["failures"][0]
    assert recorded.execute(towers.batch(kind, [(1, 8, 8)])) is None


def test_no_zeros_under_attention_of_captured_towers(
    kind: str, recorded: Any, monkeypatch: Any
) -> None:
    """Runs vLLM's wrapper of FlashAttention as if it were captured on CUDA."""
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.ops import vit_attn_wrappers as wrappers

    filled = []
    zeros = torch.zeros
    monkeypatch.setattr(
        wrappers.torch, "zeros", lambda *size, **kind: filled.append(size) or zeros(*size, **kind)
    )
    kernel = "flash_attn_varlen_func"  # A CPU does not have it.
    monkeypatch.setattr(fa_utils, kernel, lambda q, *_, out, **__: out.copy_(q), raising=False)
    cuda = SimpleNamespace(is_cuda=lambda: True, is_rocm=lambda: False)
    monkeypatch.setattr(wrappers, "current_platform", cuda)
    query = torch.ones(1, 4, 2, 8)

    def attend(*_: Any) -> torch.Tensor:
        offsets, longest = torch.tensor([0, 4], dtype=torch.int32), torch.tensor(4)
        return wrappers.flash_attn_maxseqlen_wrapper(
            query, query, query, 1, False, 3, 1.0, offsets, longest
        )

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(attend(), query)
    assert len(filled) == 1  # vLLM writes zeros here.
    monkeypatch.setattr(recorded.tower._model, "encoder_cudagraph_forward", attend)
    assert torch.equal(recorded.tower.forward({}), query)
    assert len(filled) == 1
    failing = mock.Mock(side_effect=ValueError("no kernel"))
    monkeypatch.setattr(recorded.tower._model, "encoder_cudagraph_forward", failing)
    with pytest.raises(ValueError, match="no kernel"):
        recorded.tower.forward({})
    assert wrappers.current_platform is cuda


def test_a_budget_that_holds_no_bucket(kind: str, recorded: Any, monkeypatch: Any) -> None:
    recorded.clear()
    monkeypatch.setattr(recorded.store, "fits", lambda rows: True)
    recorded.store.budget.limit = 1000
    recorded.capture("pool")
    report = recorded.report()
    assert report["graphs"] == {"exact": 0, "bucket": 0}
    assert report["dropped"] == {"memory": 2}
    assert report["bytes"] == 0
    assert recorded.execute(towers.batch(kind, [(1, 8, 8)])) is None
    assert recorded.report()["declines"] == {"no_graph": 1}
