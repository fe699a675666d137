"""Recurrent layers that get trees: their family, their form, and how a batch is parted."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.families import in_layer
from vllm_graft.spec_decode.targets.latent import latent_layer
from vllm_graft.spec_decode.targets.recurrent import recurrent_layer
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import KeptRows
from vllm_graft.spec_decode.targets.recurrent.kernels.state_moves import RecurrentCache, StateTable
from vllm_graft.spec_decode.targets.recurrent.recurrent_family import (
    RecurrentFamily,
    RecurrentState,
)
from vllm_graft.spec_decode.targets.recurrent.recurrent_kinds import (
    TreeDeltaRule,
    TreeSelectiveState,
)
from vllm_graft.spec_decode.targets.recurrent.recurrent_layer import (
    Batch,
    allocate_inputs,
    keeps_inputs,
)
from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.verification.context import TreeContext


class Layer(SimpleNamespace):
    def forward_cuda(self) -> None: ...

    def forward_cpu(self) -> None: ...


def layer_of(method: str = "forward_cuda", mode: str = "none") -> Any:
    layer = Layer(prefix="layers.0", gdn_decode_kernel="cuda", _forward_core=print)
    layer.cache_config = SimpleNamespace(mamba_cache_mode=mode)
    layer._forward_method = getattr(layer, method)
    return layer


def mamba_layer_of(*, replay: bool = False, mode: str = "none") -> Any:
    layer = SimpleNamespace(prefix="layers.0", conv_ssm_forward=print, use_replayssm=replay)
    layer.cache_config = SimpleNamespace(mamba_cache_mode=mode)
    return layer


def context() -> TreeContext:
    shape = TreeShape(topk=2, steps=3, num_nodes=3)
    workspace: Any = None
    return TreeContext.allocate(shape, 4, 32, workspace, torch.device("cpu"))


def test_a_layer_is_grafted() -> None:
    layer = layer_of()
    TreeDeltaRule.graft("layers.0", layer, context())
    assert isinstance(layer._forward_core, TreeDeltaRule)
    assert layer._forward_core.stock is print
    # The kernel that computes whole chains is left out.
    assert layer.gdn_decode_kernel == "triton"


@pytest.mark.parametrize("mode", ["none", "align"])
def test_a_mamba_layer_is_grafted(mode: str) -> None:
    layer = mamba_layer_of(mode=mode)
    TreeSelectiveState.graft("layers.0", layer, context())
    assert isinstance(layer.conv_ssm_forward, TreeSelectiveState)
    assert layer.conv_ssm_forward.stock is print


@pytest.mark.parametrize(
    ("kind", "layer", "words"),
    [
        (TreeDeltaRule, layer_of("forward_cpu"), "computes it by forward_cpu"),
        (TreeDeltaRule, layer_of(mode="all"), "--mamba-cache-mode is all"),
        (TreeSelectiveState, mamba_layer_of(replay=True), "--use-replayssm"),
        (TreeSelectiveState, mamba_layer_of(mode="all"), "--mamba-cache-mode is all"),
    ],
)
def test_other_layers_are_refused(kind: Any, layer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        kind.graft("layers.0", layer, context())
    assert "--additional-config.graft.tree.topk to 1" in str(raised.value)
    assert "layers.0" in str(raised.value)


def test_a_recurrent_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer mtp\.0 of the draft is recurrent"):
        RecurrentFamily().attach("mtp.0", layer_of(), context(), is_draft=True)


def test_other_layers_are_not_claimed() -> None:
    assert not RecurrentFamily().claims(layer_of())
    # It has no implementation of attention to be asked for its features.
    assert in_layer(layer_of()) == []


def pretend(monkeypatch: pytest.MonkeyPatch, known: Any, slots: Any = None) -> None:
    """Let layers find these metadata of attention, by their names, and slots."""
    forward = SimpleNamespace(attn_metadata=known, slot_mapping=slots)
    for module in (recurrent_layer, latent_layer):
        monkeypatch.setattr(module, "get_forward_context", lambda: forward)


def metadata(**given: Any) -> GDNAttentionMetadata:
    """Two requests of three verified rows before and behind a prompt of four tokens."""
    usual = {
        "num_prefills": 1, "num_prefill_tokens": 4, "num_decodes": 0, "num_decode_tokens": 0,
        "num_spec_decodes": 2, "num_spec_decode_tokens": 6, "num_actual_tokens": 10,
        "spec_query_start_loc": torch.tensor([0, 3, 6], dtype=torch.int32),
        "non_spec_query_start_loc": torch.tensor([0, 4], dtype=torch.int32),
        "spec_state_indices_tensor": torch.arange(1, 9, dtype=torch.int32).view(2, 4),
        "spec_sequence_masks": torch.tensor([True, False, True]),
        "spec_sequence_masks_cpu": torch.tensor([True, False, True]),
        "spec_token_indx": torch.tensor([0, 1, 2, 7, 8, 9]),
        "non_spec_token_indx": torch.tensor([3, 4, 5, 6]),
        "num_accepted_tokens": torch.tensor([1, 2], dtype=torch.int32),
    }  # fmt: skip
    return GDNAttentionMetadata(**{**usual, **given})


@pytest.mark.parametrize("kept", [False, True])
def test_prompts_are_a_batch_of_their_own(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of trees go to our kernels, the others to the layer, which is told of no draft."""
    seen: list[Any] = []
    mine, known = metadata(), {}
    known["layers.0"] = mine
    shared = context()
    shared.rows.row_parents[:10] = torch.tensor([-1, 0, 0, 9, 9, 9, 9, -1, 0, 1])

    def stock(**given: Any) -> None:
        seen.append((known["layers.0"], given["mixed_qkv"].clone()))
        given["core_attn_out"].fill_(2.0)

    def verify(self: Any, own: Any, part: Any, out: Any) -> None:
        assert part.max_rows == (4 if kept else 0)
        seen.append((part.rows, own["mixed_qkv"].clone()))
        out.fill_(1.0)

    if kept:
        shared.recurrent_form = "inputs"
        shared.kept = KeptRows.allocate(32, 16, "cpu")
    pretend(monkeypatch, known)
    monkeypatch.setattr(TreeDeltaRule, "_verify", verify)
    rule = TreeDeltaRule(layer_of(), shared, stock)
    given = torch.arange(12.0)[:, None].expand(12, 5)
    out = torch.zeros(12, 2, 3)
    rule(mixed_qkv=given, b=given[:, :2], a=given[:, :2], core_attn_out=out)
    assert out[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 0, 0]
    (rows, trees), (told, others) = seen
    assert rows.parents.tolist() == [-1, 0, 0, -1, 0, 1]
    assert (rows.num_reqs, rows.query_start_loc.tolist()) == (2, [0, 3, 6])
    assert trees[:, 0].tolist() == [0, 1, 2, 7, 8, 9]
    assert others[:, 0].tolist() == [3, 4, 5, 6]
    assert told.spec_sequence_masks is None
    assert (told.num_actual_tokens, told.num_spec_decodes, told.num_prefills) == (4, 0, 1)
    if shared.kept is not None:
        # By the first row of a request in the batch: its first row among those of trees.
        assert shared.kept.firsts.tolist()[:10] == [0, *[-1] * 6, 3, -1, -1]
        assert shared.kept.accepted[[0, 7]].tolist() == [1, 2]
        assert shared.kept.masks[:6].tolist() == [1, 3, 5, 1, 3, 7]
    # The layers behind it find what vLLM made.
    assert known["layers.0"] is mine


def mamba_metadata(**given: Any) -> Mamba2AttentionMetadata:
    """Two requests of three verified rows before a prompt of four tokens."""
    usual = {
        "num_prefills": 1, "num_prefill_tokens": 4, "num_decodes": 2, "num_decode_tokens": 6,
        "num_reqs": 3, "has_initial_states_p": None, "query_start_loc_p": torch.tensor([0, 4]),
        "state_indices_tensor_p": torch.tensor([9]),
        "state_indices_tensor_d": torch.arange(1, 9, dtype=torch.int32).view(2, 4),
        "query_start_loc_d": torch.tensor([0, 3, 6], dtype=torch.int32),
        "num_accepted_tokens": torch.tensor([1, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 20, 4]),
    }  # fmt: skip
    return Mamba2AttentionMetadata(**{**usual, **given})


@pytest.mark.parametrize("kept", [False, True])
def test_prompts_of_mamba_are_a_batch_of_their_own(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of trees go to our kernels, the others to the layer, which is told of no decode."""
    seen: list[Any] = []
    mine = mamba_metadata()
    known = {"layers.0": mine}
    shared = context()
    shared.rows.row_parents[:6] = torch.tensor([-1, 0, 0, -1, 0, 1])
    if kept:
        shared.recurrent_form = "inputs"
        shared.kept = KeptRows.allocate(32, 16, "cpu")

    def stock(projected_states: torch.Tensor, output: torch.Tensor) -> None:
        seen.append((known["layers.0"], projected_states[:, 0].tolist()))
        output.fill_(2.0)

    def verify(self: Any, projected: torch.Tensor, part: Any, output: torch.Tensor) -> None:
        assert part.max_rows == (4 if kept else 0)
        seen.append((part.rows, projected[:, 0].tolist()))
        output.fill_(1.0)

    pretend(monkeypatch, known)
    monkeypatch.setattr(TreeSelectiveState, "_verify", verify)
    scan = TreeSelectiveState(mamba_layer_of(), shared, stock)
    out = torch.zeros(10, 5)
    scan(projected_states=torch.arange(10.0)[:, None].expand(10, 7), output=out)
    assert out[:, 0].tolist() == [1.0] * 6 + [2.0] * 4
    (rows, trees), (told, others) = seen
    assert rows.parents is shared.rows.row_parents
    assert (rows.num_reqs, rows.query_start_loc.tolist()) == (2, [0, 3, 6])
    assert (trees, others) == ([0, 1, 2, 3, 4, 5], [6, 7, 8, 9])
    assert (told.num_decodes, told.num_decode_tokens, told.num_prefills) == (0, 0, 1)
    if shared.kept is not None:
        assert shared.kept.firsts.tolist()[:7] == [0, -1, -1, 3, -1, -1, -1]
        assert shared.kept.masks[:6].tolist() == [1, 3, 5, 1, 3, 7]
    # The layers behind it find what vLLM made.
    assert known["layers.0"] is mine


@pytest.mark.parametrize(
    ("kind", "layer", "known"),
    [
        (TreeDeltaRule, layer_of(), metadata(spec_sequence_masks=None)),
        (TreeDeltaRule, layer_of(), None),
        (TreeSelectiveState, mamba_layer_of(), mamba_metadata(num_decodes=0)),
        (TreeSelectiveState, mamba_layer_of(), mamba_metadata(num_accepted_tokens=None)),
        (TreeSelectiveState, mamba_layer_of(), None),
    ],
)
def test_batches_without_verified_rows_are_the_layer_s(
    kind: Any, layer: Any, known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, known and {"layers.0": known})
    seen: list[str] = []
    ours = kind(layer, context(), lambda *_, **__: seen.append("stock"))
    none = torch.zeros(1, 1, 1)
    ours(*[none] * (4 if kind is TreeDeltaRule else 2))
    assert seen == ["stock"]


def state() -> RecurrentState:
    blocks = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    cache = RecurrentCache(torch.ones(13, 8, 5), torch.ones(13, 2, 4, 4), 4, blocks, 16)
    return RecurrentState([cache], StateTable.build([cache], by_prefix=False))


def step(drafts: list[int] | None, as_decodes: list[bool] | None) -> Any:
    batch = SimpleNamespace(
        num_draft_tokens_per_req=None if drafts is None else np.array(drafts),
        prefill_runs_as_decode_np=None if as_decodes is None else np.array(as_decodes),
        is_prefilling_np=np.array([False, True, True]),
        seq_lens=torch.tensor([20, 4, 9]),
    )
    return SimpleNamespace(batch=batch)


def test_a_padded_prompt_is_verified_from_zeros() -> None:
    found, given = state(), step([3, 3, 3], [False, False, True])
    found.fork(given)
    assert given.batch.prefill_runs_as_decode_np.tolist() == [False, True, True]
    [cache] = found.caches
    empty = [
        not cache.states[block].any() and not cache.windows[block].any() for block in range(13)
    ]
    # Request 1 has blocks 5 to 8; request 2 goes on from a state that it has.
    assert [block for block in range(13) if empty[block]] == [5]


@pytest.mark.parametrize(
    ("drafts", "as_decodes"),
    [
        (None, [False] * 3),
        ([3, 3, 3], None),
        ([3, 0, 0], [False] * 3),
        ([3, 3, 3], [False, True, True]),
    ],
)
def test_others_stay_as_they_are(drafts: list[int] | None, as_decodes: list[bool] | None) -> None:
    found, given = state(), step(drafts, as_decodes)
    found.fork(given)
    kept = given.batch.prefill_runs_as_decode_np
    assert (kept if as_decodes is None else kept.tolist()) == as_decodes
    assert found.caches[0].states.all()


def form_context(form: str, max_tokens: int = 64) -> TreeContext:
    shape, none = TreeShape(topk=2, steps=4, num_nodes=7), torch.device("cpu")
    workspace: Any = None
    made = TreeContext.allocate(shape, 4, max_tokens, workspace, none)
    made.recurrent_form = form
    return made


WEIGHT = torch.zeros(24, 1, 4, dtype=torch.bfloat16)


def batch(rows: int, requests: int, padded: int = 0) -> Batch:
    return Batch(rows, requests, -(-rows // requests), padded)


def test_memory_is_for_the_largest_batch_of_trees() -> None:
    shared = form_context("auto")
    first, second = (allocate_inputs(WEIGHT, (gates, 3), shared) for gates in (2, 1))
    # Four requests of eight rows.
    assert (first.rows.shape, first.rows.dtype) == ((32, 24), torch.bfloat16)
    assert (first.gates.shape, first.gates.dtype) == ((32, 2, 3), torch.float32)
    assert second.gates.shape == (32, 1, 3)
    assert shared.kept is not None
    assert (len(shared.kept.firsts), len(shared.kept.masks)) == (64, 32)
    assert shared.kept_bytes == 2 * 32 * 24 * 2 + 32 * 9 * 4
    few = form_context("inputs", max_tokens=20)
    assert len(allocate_inputs(WEIGHT, (2, 3), few).rows) == 20
    assert few.kept is not None
    assert few.kept.max_rows == 20


@pytest.mark.parametrize(
    ("form", "given", "expected"),
    [
        ("auto", batch(32, 4), True),
        ("auto", batch(12, 4), False),
        ("inputs", batch(12, 4), True),
        # Requests without drafts: a state is read and written in either form.
        ("inputs", batch(4, 4), False),
        # A graph's padding has rows in the buffers, too.
        ("auto", batch(16, 2, padded=32), True),
        ("auto", batch(16, 2, padded=40), False),
        ("inputs", batch(65, 1), False),
        ("auto", batch(40, 5), False),
    ],
)
def test_the_form_follows_from_the_rows(form: str, given: Any, expected: bool) -> None:
    shared = form_context(form)
    assert not keeps_inputs(given, shared)
    shared.kept = KeptRows.allocate(64, 32, "cpu")
    assert keeps_inputs(given, shared) is expected
