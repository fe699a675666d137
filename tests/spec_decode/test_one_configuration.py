"""Tests of recurrent targets on a device compile one configuration of each autotuned kernel."""

from types import SimpleNamespace
from typing import Any

from tests.support.engines.one_configuration import (
    PACKAGES,
    autotuned_kernels,
    one_configuration,
    smallest,
)


def _config(stages: int = 2, warps: int = 4, **tiles: Any) -> Any:
    return SimpleNamespace(kwargs=tiles, num_stages=stages, num_warps=warps)


def test_each_kernel_has_one_configuration_inside_and_all_outside() -> None:
    before = {name: list(tuner.configs) for name, tuner in autotuned_kernels().items()}
    for package in PACKAGES:
        assert any(name.startswith(f"{package}.") for name in before), package
    # Behind heuristics, and without them.
    for kernel in ("_chunk_scan_fwd_kernel", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"):
        assert any(name.endswith(f".{kernel}") for name in before), kernel
    assert all(len(configs) > 1 for configs in before.values())
    with one_configuration() as tuners:
        assert tuners.keys() == before.keys()
        for name, tuner in tuners.items():
            [left] = tuner.configs
            assert left in before[name]
    assert {name: tuner.configs for name, tuner in autotuned_kernels().items()} == before


def test_a_kernel_with_one_configuration_is_not_tuned() -> None:
    """Triton measures a kernel with several; that is what compiles them all."""
    import torch
    import triton
    import triton.language as tl
    from triton.runtime.autotuner import Autotuner

    tiles = [triton.Config({"SIZE": size}) for size in (32, 16, 64)]

    @triton.autotune(tiles, key=["n"])
    @triton.jit
    def double(x: Any, n: Any, SIZE: tl.constexpr) -> None:
        places = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(x + places, 2 * tl.load(x + places, places < n), places < n)

    assert isinstance(double, Autotuner)
    measured: list[Any] = []
    double._bench = lambda *_, config, **__: measured.append(config) or [len(measured)]
    x = torch.ones(100)

    def launch() -> None:
        double[lambda given: (triton.cdiv(100, given["SIZE"]),)](x, 100)

    tuned, double.configs = double.configs, [smallest(double.configs)]
    launch()
    assert x.tolist() == [2.0] * 100
    assert double.best_config.kwargs == {"SIZE": 16}
    assert not measured
    double.configs = tuned
    launch()
    assert measured == tiles


def test_tiles_count_first_then_stages_then_warps() -> None:
    wide = _config(M=64, N=64)
    assert smallest([wide, _config(stages=5, M=64, N=32)]).num_stages == 5
    assert smallest([_config(3, 2, M=32), _config(2, 8, M=32)]).num_stages == 2
    assert smallest([_config(2, 8), _config(2, 2), _config(2, 4)]).num_warps == 2
    # What is no number is no tile.
    assert smallest([_config(M=32, name="x"), wide]).kwargs["name"] == "x"
