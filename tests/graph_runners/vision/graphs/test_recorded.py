"""Recorded graphs of vLLM's towers: a replay only runs operators, in a poisoned pool.

So a captured region fails here if it reads a device value on the host, keeps memory of the pool, or
reads other tensors than the static buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.vision import towers
from tests.support.vision.fake_backend import FakeBackend
from vllm_graft.graph_runners.vision import runner as runner_module
from vllm_graft.graph_runners.vision.capture.graph_backend import Captured, Region
from vllm_graft.graph_runners.vision.graphs.embedding_check import relative_error
from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner
from vllm_graft.testing import recording
from vllm_graft.testing.cuda import cuda_graphs


class Recorded(Captured):
    def __init__(self, region: Region) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self.graph, pool=(0, 7)):
            self.output = region()

    def replay(self) -> None:
        self.graph.replay()

    def reset(self) -> None:
        self.graph.reset()


class RecordingBackend(FakeBackend):
    reads_device = False

    def capture(self, region: Region) -> Captured:
        return Recorded(region)


def masked(
    self: Any, query: Any, key: Any, value: Any, cu_seqlens: Any = None, max_seqlen: Any = None,
    sequence_lengths: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Attention within segments that reads the offsets only on the device."""
    segment = torch.searchsorted(cu_seqlens, torch.arange(query.shape[1]).int(), right=True)
    mask = segment[:, None] == segment
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = (q @ k.transpose(-1, -2) * self.scale).masked_fill(~mask, -1e30)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.fixture
def recorded(model: Any) -> Iterator[ViTCudaGraphRunner]:
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for layer in model.modules():
        if isinstance(layer, MMEncoderAttention):
            layer.attn_backend = AttentionBackendEnum.FLASH_ATTN
            layer._forward_method = functools.partial(masked, layer)
    model.visual.attn_backend = AttentionBackendEnum.FLASH_ATTN
    with (
        recording(),
        mock.patch.object(runner_module, "make_backend", RecordingBackend),
    ):
        options = {"max_patches": 256, "buckets": [128, 256], "capture_share": 1}
        config = towers.make_config(options)
        runner = ViTCudaGraphRunner(config, torch.device("cpu"), torch.float32, model)
        runner.capture("pool")
        yield runner


def test_recorded_replays_are_the_eager_pass(
    kind: str, model: Any, recorded: ViTCudaGraphRunner
) -> None:
    for seed in range(3):
        for grids, modality in (
            ([(1, 8, 8)], "image"),
            ([(1, 4, 16)], "image"),
            ([(1, 8, 8), (1, 6, 8), (1, 2, 2)], "image"),
            ([(5, 4, 4)], "video"),
        ):
            inputs = towers.batch(kind, grids, modality, seed)
            expected = towers.eager(model, inputs)
            found = recorded.execute(inputs)
            assert found is not None
            for ours, theirs in zip(found, expected, strict=True):
                assert relative_error(ours, theirs) < 1e-4
    report = recorded.report()
    assert report["failures"] == []
    assert report["items"]["exact"] >= 4
    assert report["items"]["bucket"] >= 8


def test_a_region_that_reads_the_device_is_not_captured(
    kind: str, model: Any, recorded: ViTCudaGraphRunner, monkeypatch: pytest.MonkeyPatch
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
    kind: str, recorded: ViTCudaGraphRunner, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(
        recorded.tower._model,
        "encoder_cudagraph_forward",
        mock.Mock(side_effect=ValueError("no kernel")),
    )
    with pytest.raises(ValueError, match="no kernel"):
        recorded.tower.forward({})
    assert wrappers.current_platform is cuda


def test_a_budget_that_holds_no_bucket(
    kind: str, recorded: ViTCudaGraphRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
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
