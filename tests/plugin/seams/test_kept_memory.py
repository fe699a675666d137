"""What a part allocates beside a model comes back from sleep mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.device_allocator
import vllm.platforms

from vllm_graft.seams.kept_memory import TAG, kept_memory


class Allocator:
    """Notes the pools that are in use."""

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.used: list[str] = []

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        self.tags.append(tag)
        self.used.append(tag)
        yield
        self.tags.pop()


def config(*, has_allocator: bool) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(enable_cumem_allocator=has_allocator))


@pytest.mark.parametrize(
    ("on_cuda", "has_allocator", "used"),
    [(True, True, [TAG]), (True, False, []), (False, True, []), (False, False, [])],
)
def test_memory_comes_from_the_pool_that_is_kept(
    monkeypatch: pytest.MonkeyPatch, on_cuda: bool, has_allocator: bool, used: list[str]
) -> None:
    allocator = Allocator()
    platform = SimpleNamespace(is_cuda_alike=lambda: on_cuda)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform)
    monkeypatch.setattr(vllm.device_allocator, "get_mem_allocator_instance", lambda: allocator)
    with kept_memory(config(has_allocator=has_allocator)):
        assert allocator.tags == used
    assert allocator.tags == []
    assert allocator.used == used
