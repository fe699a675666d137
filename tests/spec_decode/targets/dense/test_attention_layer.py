"""Tree attention over a layer's own attention: refusals, and which kernel serves which rows."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.dense import layer as attention
from vllm_graft.spec_decode.targets.dense import plain_attention as torch_attention
from vllm_graft.spec_decode.targets.dense import two_pass
from vllm_graft.spec_decode.targets.dense.layer import (
    AttentionOps,
    DenseFamily,
    DraftTreeMetadata,
    graft_attention,
)
from vllm_graft.spec_decode.targets.dense.two_pass import KernelChoice, why_not
from vllm_graft.spec_decode.targets.families import Served, family_of
from vllm_graft.spec_decode.trees.batch import TreeBatch
from vllm_graft.spec_decode.verification.context import VerifyMode

NAME = "model.layers.3.self_attn.attn"
ROWS, HEADS, SIZE = 7, 2, 8


class FakeImpl:
    """Stands for a platform's AttentionImpl; its constructor runs once."""

    built = 0
    vllm_flash_attn_version = 2

    def __init__(self) -> None:
        type(self).built += 1
        self.scale, self.kv_cache_dtype = 0.25, "auto"
        self.sliding_window: Any = (-1, -1)
        self.alibi_slopes: Any = None
        self.sinks: Any = None
        self.logits_soft_cap: float | None = 0
        self.batch_invariant_enabled = False
        self.num_heads, self.head_size = HEADS, SIZE
        self.calls: list[tuple[Any, ...]] = []

    def forward(self, *args: Any) -> torch.Tensor:
        self.calls.append(args)
        args[6].fill_(1.0)
        result: torch.Tensor = args[6]
        return result


class Layer(SimpleNamespace):
    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self.backend)


def make_layer(backend: str = "FLASH_ATTN", **changes: Any) -> Any:
    values = {
        "kv_sharing_target_layer_name": None,
        "head_size": SIZE,
        "head_size_v": SIZE,
        "num_kv_heads": HEADS,
        "kv_cache_dtype": "auto",
        "attn_type": "decoder",
        "_q_scale": torch.tensor(2.0),
        "_k_scale": torch.tensor(3.0),
        "_v_scale": torch.tensor(4.0),
    }
    return Layer(impl=FakeImpl(), backend=backend, **{**values, **changes})


class Recorder:
    """Stands for the two operations of trees; writes 2 into what it computes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.ops = AttentionOps(
            *(self._make(name, at) for name, at in (("attend", 1), ("write", None)))
        )

    def _make(self, name: str, output: int | None) -> Any:
        def operation(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, args, kwargs))
            if output is not None:
                args[output].fill_(2.0)

        return operation

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def make_context(mode: VerifyMode) -> Any:
    return SimpleNamespace(
        mode=mode,
        shape=SimpleNamespace(num_nodes=4, topk=7),
        rows=SimpleNamespace(
            row_masks=torch.zeros(ROWS, dtype=torch.int64),
            row_depths=torch.zeros(ROWS, dtype=torch.int32),
            num_rows=torch.zeros(5, dtype=torch.int32),
            prefix_lens=torch.arange(5, dtype=torch.int32),
        ),
        plain_metadata=lambda metadata: f"plain {id(metadata)}",
        draft_window=0,
        workspace=SimpleNamespace(multiprocessors=132, capability=(9, 0)),
    )


def make_metadata(max_query_len: int = 5, starts: Sequence[int] = (0, 5, 7)) -> Any:
    return SimpleNamespace(
        query_start_loc=torch.tensor(starts),
        seq_lens=torch.tensor([20, 30, 99]),
        block_table=torch.zeros(len(starts) - 1, 4),
        max_query_len=max_query_len,
        max_seq_len=30,
        num_actual_tokens=starts[-1],
    )


def level_metadata() -> DraftTreeMetadata:
    return DraftTreeMetadata(
        level=1,
        topk=3,
        num_reqs=2,
        prefix_lens=torch.tensor([4, 5]),
        block_table=torch.zeros(2, 4),
        ancestors=torch.zeros(5),
        scratch=torch.zeros(4),
        max_seq_len=6,
    )


def grafted(mode: VerifyMode, *, is_draft: bool = False, **changes: Any) -> tuple[Any, Recorder]:
    layer, recorder = make_layer(), Recorder()
    vars(layer.impl).update(changes)
    graft_attention(NAME, layer, make_context(mode), is_draft=is_draft)
    layer.impl.ops = recorder.ops
    return layer, recorder


def run(
    layer: Any,
    metadata: Any,
    dtype: torch.dtype = torch.float32,
    computed: torch.dtype = torch.float32,
) -> torch.Tensor:
    query = torch.ones(ROWS, HEADS, SIZE).to(dtype)
    output = torch.zeros(ROWS, HEADS, SIZE, dtype=computed)
    cache = torch.zeros(2, HEADS, 16, 2 * SIZE, dtype=torch.uint8)
    result: torch.Tensor = layer.impl.forward(layer, query, query, query, cache, metadata, output)
    assert result is output
    return result


class AnyLayer(DenseFamily):
    def claims(self, layer: Any) -> bool:
        return True


def refusal(layer: Any) -> str:
    before = layer.impl
    context = make_context(VerifyMode.NONE)
    with pytest.raises(ConfigError) as caught:
        family_of(NAME, layer, [Served(AnyLayer(), ())]).attach(
            NAME, layer, context, is_draft=False
        )
    assert layer.impl is before
    return str(caught.value)


def test_an_unknown_backend_is_refused() -> None:
    message = refusal(make_layer("FLASHINFER"))
    assert f"layer {NAME} uses FLASHINFER" in message
    assert "--attention-backend FLASH_ATTN or --attention-backend TRITON_ATTN" in message


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize(
    ("owner", "name", "value", "words"),
    [
        ("impl", "alibi_slopes", [0.5], "ALiBi"),
        ("layer", "head_size_v", 16, "K and V heads of different sizes"),
        ("impl", "kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype fp8_e5m2"),
        ("impl", "kv_cache_dtype", "int8_per_token_head", "--kv-cache-dtype int8_per_token_head"),
    ],
)
def test_what_is_not_computed_is_refused(
    backend: str, owner: str, name: str, value: Any, words: str
) -> None:
    layer = make_layer(backend)
    setattr(layer.impl if owner == "impl" else layer, name, value)
    message = refusal(layer)
    assert message.startswith("--additional-config.graft.tree ")
    assert words in message
    assert NAME in message


@pytest.mark.parametrize("window", [None, -1, (-1, -1)])
@pytest.mark.parametrize("dtype", attention.KV_DTYPES)
def test_no_window_and_known_caches_are_served(window: Any, dtype: str) -> None:
    layer, _ = grafted(VerifyMode.NONE, sliding_window=window, kv_cache_dtype=dtype)
    assert isinstance(layer.impl, attention.TreeAttentionMixin)


@pytest.mark.parametrize("window", [17, (16, 0)])
def test_a_layer_s_window_and_sinks_are_handed_on(window: Any) -> None:
    """GPU backends count the keys before a row; the CPU's counts the row as well."""
    sinks = torch.ones(HEADS)
    layer, recorder = grafted(VerifyMode.ALL, sliding_window=window, sinks=sinks)
    run(layer, make_metadata())
    [(_, [batch, *_], _)] = recorder.calls
    assert batch.window == 17
    assert batch.sinks is sinks
    assert batch.row_depths is layer.impl.graft.rows.row_depths
    # The two passes know neither.
    assert why_not(layer) is not None


class Backend:
    """Stands for a backend with chunks, whose metadata is of other requests than the batch."""

    @staticmethod
    def get_name() -> str:
        return "TRITON_ATTN"

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class Builder:
    def build(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
        return make_metadata(max_query_len=1)


def test_a_layer_with_chunks_reads_the_whole_batch() -> None:
    layer, recorder = make_layer(), Recorder()
    layer.attention_chunk_size, layer.attn_backend = 16, Backend
    graft_attention(NAME, layer, make_context(VerifyMode.MIXED), is_draft=False)
    layer.impl.ops = recorder.ops
    backend = layer.attn_backend
    assert (backend.get_name(), backend is not Backend) == ("TRITON_ATTN", True)
    common = make_metadata()
    common.block_table_tensor = torch.ones(2, 4)
    metadata = backend.get_builder_cls()().build(0, common)
    run(layer, metadata)
    # The platform has the chunks, and the trees the batch.
    assert [call[5] for call in layer.impl.calls] == [metadata]
    [(_, [batch, *_], _)] = recorder.calls
    assert (batch.window, batch.chunked, batch.max_rows) == (16, True, 5)
    assert batch.query_start_loc is common.query_start_loc
    assert batch.block_table is common.block_table_tensor
    assert why_not(layer) is not None


def test_a_draft_with_chunks_is_refused() -> None:
    layer = make_layer()
    layer.attention_chunk_size = 16
    with pytest.raises(ConfigError, match=f"{NAME} has chunks of 16"):
        graft_attention(NAME, layer, make_context(VerifyMode.NONE), is_draft=True)


def test_one_layer_s_impl_is_replaced_by_a_copy() -> None:
    built = FakeImpl.built
    layer, other = make_layer(), make_layer()
    before = layer.impl
    graft_attention(NAME, layer, make_context(VerifyMode.NONE), is_draft=False)
    graft_attention("another", other, make_context(VerifyMode.NONE), is_draft=True)
    assert FakeImpl.built == built + 2
    assert type(before) is FakeImpl
    assert isinstance(layer.impl, FakeImpl)
    assert type(layer.impl) is type(other.impl)
    assert layer.impl.calls is before.calls
    assert (layer.impl.is_draft, other.impl.is_draft) == (False, True)
    assert layer.impl.ops is attention.TRITON


def test_a_cpu_layer_gets_plain_attention() -> None:
    layer = make_layer("CPU_ATTN")
    graft_attention(NAME, layer, make_context(VerifyMode.NONE), is_draft=False)
    assert isinstance(layer.impl, torch_attention.TorchAttentionImpl)
    assert layer.impl.ops is attention.TORCH


@pytest.mark.parametrize(
    ("mode", "is_draft", "platform", "tree", "value"),
    [
        (VerifyMode.NONE, False, 1, [], 1.0),
        (VerifyMode.MIXED, False, 1, ["attend"], 2.0),
        (VerifyMode.ALL, False, 0, ["attend"], 2.0),
        # The draft's extend pass follows one path, whatever the target verifies.
        (VerifyMode.ALL, True, 1, [], 1.0),
        (VerifyMode.MIXED, True, 1, [], 1.0),
    ],
)
def test_who_computes(
    mode: VerifyMode, is_draft: bool, platform: int, tree: list[str], value: float
) -> None:
    layer, recorder = grafted(mode, is_draft=is_draft)
    output = run(layer, make_metadata())
    assert len(layer.impl.calls) == platform
    assert recorder.names == tree
    assert output.unique().tolist() == [value]


@pytest.mark.parametrize("mode", [VerifyMode.NONE, VerifyMode.MIXED])
@pytest.mark.parametrize("version", [2, 3])
def test_flash_attention_3_skips_the_rows_of_trees(
    monkeypatch: pytest.MonkeyPatch, mode: VerifyMode, version: int
) -> None:
    monkeypatch.setattr(FakeImpl, "vllm_flash_attn_version", version)
    layer, _ = grafted(mode)
    metadata = make_metadata()
    run(layer, metadata)
    [given] = layer.impl.calls
    skips = version == 3 and mode is VerifyMode.MIXED
    assert given[5] == (f"plain {id(metadata)}" if skips else metadata)


def test_without_metadata_the_platform_is_asked() -> None:
    layer, recorder = grafted(VerifyMode.ALL)
    run(layer, None)
    assert len(layer.impl.calls) == 1
    assert not recorder.calls


def test_verified_rows() -> None:
    layer, recorder = grafted(VerifyMode.ALL, logits_soft_cap=30.0)
    metadata = make_metadata()
    run(layer, metadata)
    [(_, (batch, _), _)] = recorder.calls
    context = layer.impl.graft
    assert batch.query.shape == (ROWS, HEADS, SIZE)
    assert batch.kv_cache.dtype == torch.uint8
    assert batch.seq_lens.tolist() == [20, 30]
    assert batch.num_rows.data_ptr() == context.rows.num_rows.data_ptr()
    assert batch.num_rows.shape == (2,)
    assert batch.row_masks is context.rows.row_masks
    assert batch.block_table is metadata.block_table
    assert (batch.max_rows, batch.max_seq_len) == (5, 30)
    assert (batch.scale, batch.soft_cap) == (0.25, 30.0)
    assert batch.k_scale is batch.v_scale is None


@pytest.mark.parametrize(("longest", "rows"), [(1, 1), (3, 3), (5, 5), (512, 5)])
def test_rows_are_bounded_by_tree_and_query(longest: int, rows: int) -> None:
    layer, recorder = grafted(VerifyMode.ALL)
    run(layer, make_metadata(longest))
    assert recorder.calls[0][1][0].max_rows == rows


def test_an_fp8_cache_has_scales_and_its_queries_are_plain() -> None:
    layer, recorder = grafted(VerifyMode.ALL, kv_cache_dtype="fp8")
    run(layer, make_metadata(), torch.float8_e4m3fn)
    [(_, (batch, _), _)] = recorder.calls
    assert batch.query.dtype == torch.float32
    # The queries are 1, times the query's scale.
    assert batch.query.unique().tolist() == [2.0]
    assert batch.kv_cache.dtype == torch.float8_e4m3fn
    assert batch.k_scale is layer._k_scale
    assert batch.v_scale is layer._v_scale


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize(
    ("capability", "dtype", "taken"),
    [((9, 0), torch.bfloat16, True), ((8, 0), torch.bfloat16, False),
     ((9, 0), torch.float32, False)],
)  # fmt: skip
def test_a_kernel_takes_e4m3_queries_where_the_device_knows_them(
    capability: tuple[int, int], dtype: torch.dtype, taken: bool, is_draft: bool
) -> None:
    layer, recorder = grafted(VerifyMode.ALL, is_draft=is_draft, kv_cache_dtype="fp8")
    layer.impl.graft.workspace.capability = capability
    metadata = level_metadata() if is_draft else make_metadata()
    run(layer, metadata, torch.float8_e4m3fn, dtype)
    _, (batch, _), _ = recorder.calls[-1]
    assert batch.query.dtype == (torch.float8_e4m3fn if taken else dtype)
    assert batch.q_scale is layer._q_scale
    # A query of another backend, which is not quantized, stays what it is.
    run(layer, metadata, dtype, dtype)
    _, (batch, _), _ = recorder.calls[-1]
    assert batch.query.dtype == dtype


class FlashRecorder:
    """Stands for FlashAttention 3 and its planner, and for the second pass; writes 3."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[TreeBatch] = []
        self.used: list[object] = []
        self.firsts: list[TreeBatch] = []
        self.seconds: list[TreeBatch] = []
        self.multiprocessors = 0
        passes = two_pass.Passes(
            self.plan_prefix, self.flash_prefix_attention, self.attend_own_rows
        )
        monkeypatch.setattr(two_pass, "PLAIN_PASSES", passes)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def plan_prefix(self, batch: TreeBatch, *, multiprocessors: int) -> Any:
        self.plans.append(batch)
        return object()

    def flash_prefix_attention(
        self, batch: TreeBatch, *, plan: object, multiprocessors: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.firsts.append(batch)
        self.used.append(plan)
        self.multiprocessors = multiprocessors
        return torch.zeros(batch.query.shape), torch.zeros(batch.query.shape[1::-1])

    def attend_own_rows(self, batch: TreeBatch, prefix: Any, lse: Any, out: torch.Tensor) -> None:
        self.seconds.append(batch)
        out.fill_(3.0)


def even_metadata() -> Any:
    """Make metadata of requests of three rows each."""
    return make_metadata(3, starts=(0, 3, 6))


def with_flash(
    monkeypatch: pytest.MonkeyPatch, mode: VerifyMode = VerifyMode.ALL, **changes: Any
) -> tuple[Any, Recorder, FlashRecorder]:
    layer, recorder = grafted(mode, **changes)
    flash = FlashRecorder(monkeypatch)
    layer.impl.two_pass = two_pass.TwoPass(KernelChoice("flash"))
    return layer, recorder, flash


def test_an_even_batch_of_trees_takes_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, recorder, flash = with_flash(monkeypatch, logits_soft_cap=30.0)
    metadata = even_metadata()
    output = run(layer, metadata)
    # The last row is padding.
    assert [row.unique().tolist() for row in output] == [[3.0]] * 6 + [[0.0]]
    assert not recorder.calls
    assert not layer.impl.calls
    [first], [second], context = flash.firsts, flash.seconds, layer.impl.graft
    # The batch is made once per call.
    assert first is second
    assert first.query.shape == (6, HEADS, SIZE)
    assert first.prefix_lens.data_ptr() == context.rows.prefix_lens.data_ptr()
    assert first.prefix_lens.shape == (2,)
    assert first.block_table is metadata.block_table
    assert (first.max_rows, first.max_seq_len, flash.multiprocessors) == (3, 30, 132)
    assert (first.scale, first.soft_cap, first.q_scale) == (0.25, 30.0, None)
    assert first.row_masks is context.rows.row_masks
    assert first.num_rows.data_ptr() == context.rows.num_rows.data_ptr()
    assert layer.impl.two_pass.choice.report()["used"] == {"2x3": "flash"}


def test_a_forward_pass_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _, flash = with_flash(monkeypatch)
    first, second = even_metadata(), even_metadata()
    for metadata in (first, first, second, first):
        run(layer, metadata)
    assert len(flash.plans) == 3
    used = flash.used
    assert used[0] is used[1]
    assert len({id(plan) for plan in used}) == 3
    # Plans that were made before a capture are not in the captured graph.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run(layer, first)
    run(layer, first)
    assert len(flash.plans) == 4


@pytest.mark.parametrize("mode", [VerifyMode.NONE, VerifyMode.MIXED])
def test_mixed_batches_keep_the_kernel(monkeypatch: pytest.MonkeyPatch, mode: VerifyMode) -> None:
    layer, recorder, flash = with_flash(monkeypatch, mode)
    run(layer, even_metadata())
    assert recorder.names == ["attend"] * (mode is VerifyMode.MIXED)
    assert not flash.firsts


def test_uneven_batches_keep_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, recorder, flash = with_flash(monkeypatch)
    assert run(layer, make_metadata()).unique().tolist() == [2.0]
    assert recorder.names == ["attend"]
    assert not flash.firsts
    assert layer.impl.two_pass.choice.declined == 1


def test_a_size_for_which_the_kernel_is_faster_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, recorder, flash = with_flash(monkeypatch)
    layer.impl.two_pass = two_pass.TwoPass(KernelChoice("auto", why="nothing was measured"))
    run(layer, even_metadata())
    assert recorder.names == ["attend"]
    assert not flash.firsts
    assert layer.impl.two_pass.choice.declined == 0


def test_both_are_fp8_or_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, recorder, flash = with_flash(monkeypatch, kv_cache_dtype="fp8")
    run(layer, even_metadata(), torch.float8_e4m3fn)
    [first], [second] = flash.firsts, flash.seconds
    assert first is second
    assert first.query.dtype == first.kv_cache.dtype == torch.float8_e4m3fn
    for name in ("q_scale", "k_scale", "v_scale"):
        assert getattr(first, name) is getattr(layer, f"_{name}")
    run(layer, even_metadata())
    assert recorder.names == ["attend"]
    assert layer.impl.two_pass.choice.declined == 1


@pytest.mark.parametrize("mode", list(VerifyMode))
def test_a_level_of_the_draft(mode: VerifyMode) -> None:
    layer, recorder = grafted(mode, is_draft=True)
    metadata = level_metadata()
    scratch, ancestors = metadata.scratch, metadata.ancestors
    output = run(layer, metadata)
    assert not layer.impl.calls
    assert output.unique().tolist() == [2.0]
    # Rows of a level see their ancestors' K/V only once it is stored.
    assert recorder.names == ["write", "attend"]
    (_, write, _), (_, (batch, _), _) = recorder.calls
    assert write[2:] == (scratch, 1, 2, 3)
    assert batch.scratch_kv is scratch
    assert batch.ancestors is ancestors
    assert batch.level == 1
    assert (batch.num_reqs, batch.topk, batch.max_seq_len) == (2, 3, 6)
    assert batch.prefix_lens is metadata.prefix_lens
