"""The back ends: the fake one, and the Python side of the CUDA one."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.support.vision.fake_backend import FakeBackend
from vllm_graft.base.errors import GraftError
from vllm_graft.graph_runners.vision.capture.graph_backend import make_backend, no_gc
from vllm_graft.graph_runners.vision.capture.tensor_cache import num_bytes

CPU = torch.device("cpu")


def test_the_fake_runs_the_region_on_its_tensors() -> None:
    backend = FakeBackend(CPU)
    cell, factor = torch.ones(2), [2.0]
    captured = backend.capture(lambda: cell * factor[0])
    kept = captured.output
    cell.fill_(5)
    captured.replay()
    assert kept.tolist() == [10, 10]
    assert backend.reserved() == num_bytes(kept) == 8
    captured.reset()
    with pytest.raises(GraftError):
        captured.replay()


def test_garbage_is_not_collected_under_capture() -> None:
    assert gc.isenabled()
    with no_gc():
        assert not gc.isenabled()
        with no_gc():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(GraftError, match="no CUDA graphs on the device cpu"):
        make_backend(CPU)
