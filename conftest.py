"""Tests run kernels in Triton's interpreter and engines on the CPU if there is no CUDA device."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# At import: looking for garbage in what is imported and collected is a quarter of their time, and
# little is found. Engines collect theirs when they end.
gc.set_threshold(100_000, 50, 50)

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Before torch looks for devices: several processes share the cards.
    cards = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if cards:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(int(worker.removeprefix("gw")) % cards))

import pytest  # noqa: E402
import torch  # noqa: E402

HAS_CUDA = torch.cuda.is_available()

NOT_QUICK = ("engine", "gpu", "nightly", "slow")
"""Marks of tests that a quick run leaves out."""

LONG_ROOMS = frozenset({
    "benchmarks",
    "tests/graph_runners/vision",
    "tests/hicache/copies",
    "tests/hicache/storage",
    "tests/plugin/scaffold",
    "tests/plugin/seams",
    "tests/plugin/test_distribution.py",
    "tests/plugin/test_examples.py",
    "tests/plugin/testing",
    "tests/spec_decode/attention",
    "tests/spec_decode/kernels",
    "tests/spec_decode/tuning",
})  # fmt: skip
"""Folders and files that a quick run leaves out: they interpret kernels, simulate, write to disks
or start processes for minutes."""

if not HAS_CUDA:
    # At import: test modules decorate kernels, and pull in vllm, while they are collected.
    from vllm_graft.testing import engine, torchvision_import
    from vllm_graft.testing.interpreter import install as interpreter

    interpreter.install()
    torchvision_import.install()
    engine.set_environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options that ask for more tests, or for fewer."""
    parser.addoption("--nightly", action="store_true", help="run tests marked nightly as well")
    parser.addoption("--quick", action="store_true", help="run the pure tests that take no time")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave long rooms out of a quick run before they are imported, which takes a while, too."""
    if not config.getoption("--quick"):
        return None
    engines = collection_path.name.endswith(("_engine.py", "_gpu.py"))
    # What the command line names is not asked about, but what lies below is.
    place = collection_path.relative_to(config.rootpath)
    rooms = {each.as_posix() for each in (place, *place.parents)}
    return True if engines or rooms & LONG_ROOMS else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Save engines time, in fixtures too; tests of kernels, and slow ones, interpret it all."""
    marked = item.get_closest_marker
    with pytest.MonkeyPatch.context() as patch:
        if marked("engine") and not marked("slow") and not HAS_CUDA:
            from tests.support.engines.quick_kernels import quicken

            quicken(patch.setattr)
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with long tests first, and skip what was not asked for or needs a GPU."""
    if not config.getoption("--nightly"):
        later = pytest.mark.skip(reason="runs with --nightly")
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(later)
    if config.getoption("--quick"):
        items[:] = [item for item in items if not any(map(item.get_closest_marker, NOT_QUICK))]
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
