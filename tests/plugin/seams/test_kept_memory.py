"""What a part allocates beside a model comes back from sleep mode."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.device_allocator
import vllm.platforms

from vllm_graft.seams.kept_memory import TAG, kept_memory


@pytest.mark.parametrize(
    ("on_cuda", "has_allocator", "used"),
    [(True, True, [TAG]), (True, False, []), (False, True, []), (False, False, [])],
)
def test_memory_comes_from_the_pool_that_is_kept(
    monkeypatch: pytest.MonkeyPatch, on_cuda: bool, has_allocator: bool, used: list[str]
) -> None:
    tags: list[str] = []
    used_now: list[str] = []

    @contextlib.contextmanager
    def use_memory_pool(tag: str) -> Iterator[None]:
        tags.append(tag)
        used_now.append(tag)
        yield
        used_now.pop()

    platform = SimpleNamespace(is_cuda_alike=lambda: on_cuda)
    allocator = SimpleNamespace(use_memory_pool=use_memory_pool)
    model = SimpleNamespace(enable_cumem_allocator=has_allocator)
    config: Any = SimpleNamespace(model_config=model)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform)
    monkeypatch.setattr(vllm.device_allocator, "get_mem_allocator_instance", lambda: allocator)
    with kept_memory(config):
        assert used_now == used
    assert used_now == []
    assert tags == used
