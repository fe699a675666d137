"""Other weights for a draft: what fits, what does not, and where a swap writes."""

import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vllm_graft.spec_decode.heads.head_weights import HeadWeights, attach, order


class Draft(nn.Module):
    """A draft whose embedding is the target's; its loader knows rows of `fc` by two names."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed, self.fc, self.norm = embed, nn.Linear(4, 6, bias=False), nn.RMSNorm(4)
        self.ids = nn.Parameter(torch.arange(3), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = {"top": self.fc.weight[:3], "rest": self.fc.weight[3:], "norm": self.norm.weight}
        places |= {"ids": self.ids, "embed": self.embed.weight}
        for name, each in weights:
            places[name].data.copy_(each)


def numbers(value: float, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {"top": torch.full((3, 4), value), "rest": torch.full((3, 4), -value)}
    found |= {"norm": torch.full((4,), value), "ids": torch.arange(3)}
    return {**found, "embed": torch.full((9, 4), value), **others}


@pytest.fixture
def target() -> nn.Module:
    made = nn.Module()
    made.embed = nn.Embedding(9, 4)
    return made


@pytest.fixture
def worker(target: Any, tmp_path: Path) -> Any:
    """A worker whose draft may have other weights, and counts how often copies are renewed."""
    draft, renewed = Draft(target.embed), list[int]()
    save_file(numbers(1.0), tmp_path / "base")
    speculator = SimpleNamespace(head=SimpleNamespace(renew=lambda: renewed.append(1)))
    runner = SimpleNamespace(
        speculator=speculator, get_draft_model=lambda: draft, get_model=lambda: target
    )
    made = SimpleNamespace(model_runner=runner, draft=draft, renewed=renewed)
    attach(made, "0", str(tmp_path / "base"))
    assert problem(made, "0") == ""
    return made


def problem(worker: Any, head: str) -> str:
    end = time.monotonic() + 30
    while (said := order(worker, "problem", head)[0]) is None and time.monotonic() < end:
        time.sleep(0.001)
    assert said is not None
    return str(said)


def read(worker: Any, folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, folder / "new")
    order(worker, "read", "1", str(folder / "new"))
    return problem(worker, "1")


def test_a_swap_writes_to_the_same_places(worker: Any, target: Any, tmp_path: Path) -> None:
    draft = worker.draft
    places = [each.data_ptr() for each in draft.parameters()]
    embed, before = target.embed.weight.clone(), draft.fc.weight.clone()
    assert read(worker, tmp_path, numbers(2.0)) == ""
    # Reading changes nothing of the draft.
    assert torch.equal(draft.fc.weight, before)
    order(worker, "swap", "1")
    assert draft.fc.weight.flatten().tolist() == [2.0] * 12 + [-2.0] * 12
    assert draft.norm.weight.tolist() == [2.0] * 4
    assert [each.data_ptr() for each in draft.parameters()] == places
    assert worker.renewed == [1]
    # What the target has too is left alone, though the file has it.
    assert torch.equal(target.embed.weight, embed)
    order(worker, "swap", "0")
    assert draft.norm.weight.tolist() == [1.0] * 4
    order(worker, "keep", "0")
    assert order(worker, "swap", "1") == (None, "KeyError: '1'")


def test_what_a_file_lacks_stays_as_it_is(worker: Any, tmp_path: Path) -> None:
    tensors = numbers(2.0)
    del tensors["norm"]
    norm = worker.draft.norm.weight.clone()
    assert read(worker, tmp_path, tensors) == ""
    order(worker, "swap", "1")
    assert torch.equal(worker.draft.norm.weight, norm)
    assert worker.draft.fc.weight[0].tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"other": torch.zeros(1)}, "it has 'other', and the head of the start has not"),
        ({"norm": torch.ones(5)}, "norm is [5], and that of the start is [4]"),
        ({"ids": torch.tensor([0, 1, 3])}, "ids is not that of the head of the start"),
        ({"norm": torch.tensor([1, 2, 3, float("nan")])}, "norm has numbers that are NaN"),
        ({"top": torch.full((3, 4), float("inf"))}, "top has numbers that are NaN or infinite"),
        ({"top": None}, "weight is not whole"),
    ],
)
def test_what_does_not_fit_is_told(
    worker: Any, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    tensors = {name: each for name, each in numbers(2.0, **change).items() if each is not None}
    assert says in read(worker, tmp_path, tensors)
    # An error that is raised would leave what other ranks say in vLLM's executor.
    assert says in order(worker, "swap", "1")[1]
    assert worker.renewed == []


def test_half_a_file_is_told(worker: Any, tmp_path: Path) -> None:
    save_file(numbers(2.0), tmp_path / "whole")
    (tmp_path / "half").write_bytes((tmp_path / "whole").read_bytes()[:-50])
    order(worker, "read", "1", str(tmp_path / "half"))
    assert "SafetensorError" in problem(worker, "1")


def test_a_rank_without_a_draft_is_always_ready(target: nn.Module, tmp_path: Path) -> None:
    made = HeadWeights(None, target, None, str(tmp_path / "none"))
    made.read("3", str(tmp_path / "none"))
    assert made.problem("3") == ""
    made.swap("3")
