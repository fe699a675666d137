"""Tests run kernels in Triton's interpreter and engines on the CPU if there is no CUDA device."""

from __future__ import annotations

import gc

# At import: looking for garbage in what is imported and collected is a quarter of their time, and
# little is found. Engines collect theirs when they end.
gc.set_threshold(100_000, 50, 50)

import pytest  # noqa: E402
import torch  # noqa: E402

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    # At import: test modules decorate kernels, and pull in vllm, while they are collected.
    from vllm_graft.testing import engine, torchvision_import
    from vllm_graft.testing.interpreter import install as interpreter

    interpreter.install()
    torchvision_import.install()
    engine.set_environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that asks for the long tests."""
    parser.addoption("--nightly", action="store_true", help="run tests marked nightly as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with long tests first, and skip what was not asked for or needs a GPU."""
    if not config.getoption("--nightly"):
        later = pytest.mark.skip(reason="runs with --nightly")
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(later)
    # Whole files go to processes in this order: the long ones first, so that none waits at the end.
    long = {
        item.path
        for item in items
        if item.get_closest_marker("engine") or item.get_closest_marker("slow")
    }
    items.sort(key=lambda item: item.path not in long)
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
