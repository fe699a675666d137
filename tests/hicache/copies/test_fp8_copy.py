"""The kernels that copy runs, in Triton's interpreter, and K/V that the host keeps as e4m3."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.support.launches import check_kernels
from tests.support.samples.fp8_numbers import DTYPES, back, numbers, rounded, same, same_codes
from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.hicache import copies as copies_room
from vllm_graft.hicache import setup
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.copies import fp8_kernel, packed_kernel
from vllm_graft.hicache.copies.copy_engine import fp8_copy
from vllm_graft.hicache.copies.page_kernel import fits, launch
from vllm_graft.hicache.messages.operation import Direction
from vllm_graft.hicache.pages import geometry
from vllm_graft.hicache.pages.host_form import FP8, PACKED, HostForm
from vllm_graft.hicache.pages.layout import (
    Copies,
    LayerPages,
    copies,
    group_layers,
    layer_copies,
    pages_bytes,
)
from vllm_graft.hicache.pages.namespace import INPUTS

GAP = 64


def _kernel(dtype: torch.dtype, runs: Copies, direction: Direction) -> Callable[[int, int], None]:
    assert fits(runs)
    with mock.patch.object(fp8_kernel, "on_device", torch.from_numpy):
        return fp8_kernel.convert_runs(dtype, runs, direction)


def _unaligned(
    dtype: torch.dtype, runs: Copies, direction: Direction
) -> Callable[[int, int], None]:
    table = torch.from_numpy(np.stack([runs.host, runs.device, runs.sizes]))
    return lambda begin, end: fp8_kernel.launch(table, begin, end, dtype, direction, False)


COPIES: list[Any] = [fp8_copy, _kernel, _unaligned]


def _runs(device: torch.Tensor, host: torch.Tensor, counts: list[int]) -> Copies:
    starts = np.cumsum([0, *counts[:-1]]) + GAP * np.arange(len(counts))
    return Copies(
        device.data_ptr() + starts * device.itemsize, host.data_ptr() + starts, np.asarray(counts)
    )


@pytest.mark.parametrize("copy", COPIES, ids=["memory", "kernel", "unaligned"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_rounded_as_torch_does(copy: Any, dtype: torch.dtype) -> None:
    """The numbers include ties, subnormals, both zeros, numbers over 448, infinities and NaN."""
    values = numbers(dtype)
    host = torch.zeros(len(values), dtype=torch.uint8)
    runs = _runs(values, host, [len(values)])
    copy(dtype, runs, Direction.STORE)(0, 1)
    assert same_codes(host, rounded(values))
    assert host[values == 0].unique().tolist() == [0, 128]
    assert host[values > 448].unique().tolist() == [0x7E]
    assert (host & 0x7F)[values.isnan()].unique().tolist() == [0x7F]

    found = torch.zeros_like(values)
    copy(dtype, _runs(found, host, [len(values)]), Direction.LOAD)(0, 1)
    assert same(found, back(host, dtype))
    # A page that is stored again has the same bytes.
    again = torch.zeros_like(host)
    copy(dtype, _runs(found, again, [len(values)]), Direction.STORE)(0, 1)
    assert torch.equal(again[~values.isnan()], host[~values.isnan()])
    normal = (values.abs() >= 2**-6) & (values.abs() <= 448)
    error = (found.double() - values.double()).abs()[normal] / values.double().abs()[normal]
    assert 0.05 < error.max() <= 2**-4


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("copy", COPIES, ids=["memory", "kernel", "unaligned"])
def test_runs_of_a_range_arrive_and_nothing_else_changes(copy: Any, direction: Direction) -> None:
    counts = [16, 48, 40_000, 32_768, 64]
    if copy is not _kernel:
        counts[1] = 37
    device = torch.randn(sum(counts) + GAP * len(counts)).to(torch.bfloat16)
    host = torch.randint(0, 0x70, (len(device),), dtype=torch.uint8)
    runs = _runs(device, host, counts)
    expected, other = device.clone(), host.clone()
    for begin, count in list(zip((runs.host - host.data_ptr()).tolist(), counts))[1:4]:
        part = slice(begin, begin + count)
        if direction is Direction.STORE:
            other[part] = rounded(device[part])
        else:
            expected[part] = back(host[part], torch.bfloat16)
    copy(torch.bfloat16, runs, direction)(1, 4)
    assert torch.equal(device, expected)
    assert torch.equal(host, other)


def test_each_form_has_a_namespace_of_its_own() -> None:
    sizes: Any = SimpleNamespace(groups=(), shape=SimpleNamespace(num_shards=1))
    [read] = [each.read for each in INPUTS if each.name == "options"]
    found = []
    for host_dtype in (None, "fp8", "packed"):
        config = HiCacheConfig.parse({"host_bytes": 1, "host_dtype": host_dtype})
        nothing: Any = None
        engine = setup.engine_of(config, sizes, nothing, nothing, None)
        assert engine.layout == {"pools": {}, "shards": 1}
        found.append(read(engine))
    assert [each["host_dtype"] for each in found] == [None, "fp8", "packed"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_page_takes_a_byte_an_element(dtype: torch.dtype) -> None:
    cache = torch.zeros(2, 6, 2, 4, 8, dtype=dtype).permute(1, 0, 2, 3, 4)[:, :, :, :3]
    names = ["layers.0", "layers.1"]
    caches = {name: cache[:, number] for number, name in enumerate(names)}
    plain, small = (group_layers(names, caches, 6, form) for form in (None, FP8))
    assert pages_bytes(small) == 2 * 2 * 3 * 8
    assert pages_bytes(plain) == dtype.itemsize * pages_bytes(small)
    for one, other in zip(plain, small):
        assert (one.address, one.block_stride) == (other.address, other.block_stride)
        item = dtype.itemsize
        assert one.runs == tuple((at, to * item, size * item) for at, to, size in other.runs)


FULL = partial(FullAttentionSpec, block_size=16, num_kv_heads=2, head_size=32)
WINDOW = partial(SlidingWindowSpec, block_size=16, num_kv_heads=2, head_size=32, sliding_window=64)
STATE = MambaSpec(16, shapes=((4, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def _only_dtype(*specs: Any, form: HostForm = FP8) -> torch.dtype:
    groups = [KVCacheGroupSpec([f"layers.{n}.attn"], spec) for n, spec in enumerate(specs)]
    config = KVCacheConfig(8, [], groups)
    return geometry._only_dtype(form, geometry.cached_groups(config), config)


def test_attention_of_several_kinds_is_kept() -> None:
    assert _only_dtype(FULL(dtype=torch.float16)) is torch.float16
    specs = FULL(dtype=torch.bfloat16), WINDOW(dtype=torch.bfloat16)
    assert _only_dtype(*specs) is torch.bfloat16


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([FULL(dtype=torch.bfloat16), STATE], "pool 1:last is a MambaSpec"),
        ([LATENT], "pool 0:all is a MLAAttentionSpec"),
        ([FULL(dtype=torch.float8_e4m3fn)], "FullAttentionSpec of torch.float8_e4m3fn"),
        ([FULL(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)], "of torch.uint8"),
        ([FULL(dtype=torch.bfloat16, kv_quant_mode=KVQuantMode.NVFP4)], "FullAttentionSpec"),
        ([FULL(dtype=torch.float16), WINDOW(dtype=torch.float32)], "float16', 'torch.float32"),
    ],
)
def test_other_bytes_are_refused(specs: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"extra_config\.host_dtype=fp8: .*remove") as caught:
        _only_dtype(*specs)
    assert words in str(caught.value)


def test_latents_in_bfloat16_are_packed_and_other_types_are_not() -> None:
    kept = LATENT, FULL(dtype=torch.bfloat16), WINDOW(dtype=torch.bfloat16)
    assert _only_dtype(*kept, form=PACKED) is torch.bfloat16
    for other in (FULL(dtype=torch.float16), replace(LATENT, dtype=torch.uint8), STATE):
        words = rf"host_dtype=packed: pool 1:\w+ is a {type(other).__name__} of .*: remove"
        with pytest.raises(ConfigError, match=words):
            _only_dtype(FULL(dtype=torch.bfloat16), other, form=PACKED)
    assert PACKED.num_bytes(128) == 198
    with pytest.raises(GraftError, match="runs of 130 numbers, which is no multiple of 64"):
        PACKED.num_bytes(130)


def test_another_type_is_unknown() -> None:
    assert HiCacheConfig.parse({"host_bytes": 1, "host_dtype": "fp8"}).host_dtype == "fp8"
    assert HiCacheConfig.parse({"host_bytes": 1}).host_dtype is None
    with pytest.raises(ConfigError, match=r"extra_config\.host_dtype: 'int4' is refused"):
        HiCacheConfig.parse({"host_bytes": 1, "host_dtype": "int4"})


def _byte_runs(sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, Copies]:
    source = torch.randint(0, 256, (sum(sizes) + 64 * len(sizes),), dtype=torch.uint8)
    target = torch.zeros_like(source)
    starts = np.cumsum([0, *sizes[:-1]]) + 64 * np.arange(len(sizes))
    lengths = np.asarray(sizes, dtype=np.int64)
    return source, target, Copies(target.data_ptr() + starts, source.data_ptr() + starts, lengths)


def test_runs_of_a_range_arrive_and_no_other_byte_changes() -> None:
    sizes = [16, 64, 40_000, 32_768, 4096, 48]
    source, target, runs = _byte_runs(sizes)
    table = torch.from_numpy(np.stack([runs.host, runs.device, runs.sizes // 8]))
    launch(table, 1, 5)
    expected = torch.zeros_like(target)
    for at, size in list(zip(runs.host - source.data_ptr(), sizes))[1:5]:
        expected[at : at + size] = source[at : at + size]
    assert torch.equal(target, expected)
    launch(table, 3, 3)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(("change", "fit"), [(0, True), (8, False), (16, True)])
def test_what_is_not_aligned_is_left_to_copy_engines(change: int, fit: bool) -> None:
    aligned = np.asarray([4096, 8192], dtype=np.int64)
    for column in range(3):
        columns = [aligned, aligned, aligned]
        columns[column] = aligned + change
        assert fits(Copies(*columns)) is fit
    assert fits(Copies(*[aligned[:0]] * 3))


def test_layers_come_one_after_the_other() -> None:
    layers = [
        LayerPages("layers.0", 1000, 100, ((0, 0, 16), (50, 16, 32))),
        LayerPages("layers.1", 5000, 200, ((0, 48, 64),)),
    ]
    other = [LayerPages("mamba", 9000, 10, ((0, 0, 8),))]
    found, ranges = layer_copies([(layers, [3, 1], [0, 2]), (other, [7], [1])], 4096, 1 << 20)
    assert ranges == {"layers.0": (0, 4), "layers.1": (4, 6), "mamba": (6, 7)}
    assert found.device.tolist() == [1300, 1100, 1350, 1150, 5600, 5200, 9070]
    slots = [slot * 4096 + (1 << 20) for slot in (0, 2, 0, 2, 0, 2, 1)]
    offsets = [0, 0, 16, 16, 48, 48, 0]
    assert found.host.tolist() == [slot + offset for slot, offset in zip(slots, offsets)]
    assert found.sizes.tolist() == [16, 16, 32, 32, 64, 64, 8]
    whole = copies(layers, [3, 1], [0, 2], 4096, 1 << 20, 8)
    assert whole.num_bytes == found.num_bytes - 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(each, marks=pytest.mark.nightly) for each in (80, 100))]
)
def test_every_kernel_compiles(capability: int) -> None:
    table = torch.empty(3, 1, dtype=torch.int64, device="meta")
    converted = itertools.product(fp8_kernel.TYPES, Direction, (True, False))
    calls = [partial(fp8_kernel.launch, table, 0, 1, *each) for each in converted]
    packed = itertools.product(Direction, (True, False))
    calls += [partial(packed_kernel.launch, table, 0, 1, *each) for each in packed]
    check_kernels(copies_room, [partial(launch, table, 0, 1), *calls], capability)
