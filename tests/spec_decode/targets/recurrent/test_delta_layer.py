"""Which layers with the gated delta rule get trees, and how a batch is parted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.families import in_layer
from vllm_graft.spec_decode.targets.recurrent import recurrent_layer
from vllm_graft.spec_decode.targets.recurrent.delta_layer import TreeDeltaRule
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import KeptRows
from vllm_graft.spec_decode.targets.recurrent.recurrent_family import RecurrentFamily
from vllm_graft.spec_decode.trees.shape import TreeShape
from vllm_graft.spec_decode.verification.context import TreeContext


class Layer(SimpleNamespace):
    """What the graft reads of a layer."""

    def forward_cuda(self) -> None: ...

    def forward_cpu(self) -> None: ...


def layer_of(method: str = "forward_cuda", mode: str = "none") -> Any:
    layer = Layer(prefix="layers.0", gdn_decode_kernel="cuda", _forward_core=print)
    layer.cache_config = SimpleNamespace(mamba_cache_mode=mode)
    layer._forward_method = getattr(layer, method)
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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "forward_cpu"}, "computes it by forward_cpu"),
        ({"mode": "all"}, "--mamba-cache-mode is all"),
    ],
)
def test_other_layers_are_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        TreeDeltaRule.graft("layers.0", layer_of(**given), context())
    assert "--additional-config.graft.tree.topk to 1" in str(raised.value)
    assert "layers.0" in str(raised.value)


def test_a_recurrent_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer mtp\.0 of the draft is recurrent"):
        RecurrentFamily().attach("mtp.0", layer_of(), context(), is_draft=True)


def test_other_layers_are_not_claimed() -> None:
    assert not RecurrentFamily().claims(layer_of())
    # It has no implementation of attention to be asked for its features.
    assert in_layer(layer_of()) == []


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
    forward = SimpleNamespace(attn_metadata=known)
    monkeypatch.setattr(recurrent_layer, "get_forward_context", lambda: forward)
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


@pytest.mark.parametrize("given", [{"spec_sequence_masks": None}, None])
def test_batches_without_verified_rows_are_the_layer_s(
    given: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = None if given is None else {"layers.0": metadata(**given)}
    forward = SimpleNamespace(attn_metadata=known)
    monkeypatch.setattr(recurrent_layer, "get_forward_context", lambda: forward)
    seen: list[str] = []
    rule = TreeDeltaRule(layer_of(), context(), lambda **_: seen.append("stock"))
    none = torch.zeros(1, 1, 1)
    rule(mixed_qkv=none, b=none, a=none, core_attn_out=none)
    assert seen == ["stock"]
