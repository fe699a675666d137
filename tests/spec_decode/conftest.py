"""Fixtures of all tests of trees and draft chains."""

import importlib.metadata
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.support.engines.one_configuration import one_configuration
from tests.support.engines.pair_fixtures import device, expected, pair, samples
from vllm_graft.hooks import manager

__all__ = ["device", "expected", "flash_attention_3", "pair", "samples"]


@pytest.fixture
def flash_attention_3() -> None:
    """Skip the test where vLLM has no FlashAttention 3."""
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    if not is_fa_version_supported(3):
        pytest.skip("needs FlashAttention 3, that is a Hopper GPU")


@pytest.fixture(scope="module")
def untuned() -> Iterator[None]:
    """Leave vLLM's autotuned kernels of recurrent layers one configuration each."""
    with one_configuration():
        yield


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a module as a third party's plugin, for this process."""

    def install(module: Any) -> None:
        point = importlib.metadata.EntryPoint("toy", module.__name__, manager.GROUP)
        found = manager.Manager([point])
        assert not found.broken
        monkeypatch.setattr(manager, "manager", lambda: found)

    return install


@pytest.fixture
def learn(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the drafter's table the target's answers: far more is accepted than by chance."""

    from tests.support.models import table_drafter

    def give(answers: Iterable[Any]) -> None:
        tokens = [getattr(answer, "tokens", answer) for answer in answers]
        monkeypatch.setattr(table_drafter, "NEXT", table_drafter.learned(tokens))
        plugin(table_drafter)

    return give
