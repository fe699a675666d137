"""Which share of the bandwidth a step uses, and where that is not known."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import step_bytes
from benchmarks.step_bytes import StepBytes


def model(name: str) -> torch.nn.Module:
    """A model with one weight of 64 bytes, under a name."""
    inner = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False)})
    return torch.nn.ModuleDict({"layers": inner})


def worker(target: torch.nn.Module) -> SimpleNamespace:
    config = SimpleNamespace(kv_cache_groups=[])
    device = torch.device("cuda")
    runner = SimpleNamespace(model=target, kv_cache_config=config, device=device, speculator=None)
    return SimpleNamespace(model_runner=runner)


def test_targets_with_experts_have_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_bytes, "copy_bandwidth", lambda device: 1000.0)
    dense = step_bytes.step_bytes(worker(model("mlp")))
    assert dense == StepBytes(target=64, draft=0, token=0, copy_rate=1000.0)
    assert dense.use(0.128, 0) == 0.5
    sparse = step_bytes.step_bytes(worker(model("experts")))
    assert sparse.use(0.128, 0) is None
    # Parts of a name count, and not its letters.
    assert not step_bytes.has_experts(model("experts_gate"))
