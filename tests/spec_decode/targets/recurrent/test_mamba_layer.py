"""Which layers of Mamba-2 get trees, and how a batch is parted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.recurrent import recurrent_layer
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import KeptRows
from vllm_graft.spec_decode.targets.recurrent.mamba_layer import TreeSelectiveState
from vllm_graft.spec_decode.trees.shape import TreeShape
from vllm_graft.spec_decode.verification.context import TreeContext


def layer_of(*, replay: bool = False, mode: str = "none") -> Any:
    layer = SimpleNamespace(prefix="layers.0", conv_ssm_forward=print, use_replayssm=replay)
    layer.cache_config = SimpleNamespace(mamba_cache_mode=mode)
    return layer


def context() -> TreeContext:
    shape = TreeShape(topk=2, steps=3, num_nodes=3)
    workspace: Any = None
    return TreeContext.allocate(shape, 4, 32, workspace, torch.device("cpu"))


@pytest.mark.parametrize("mode", ["none", "align"])
def test_a_layer_is_grafted(mode: str) -> None:
    layer = layer_of(mode=mode)
    TreeSelectiveState.graft("layers.0", layer, context())
    assert isinstance(layer.conv_ssm_forward, TreeSelectiveState)
    assert layer.conv_ssm_forward.stock is print


@pytest.mark.parametrize(
    ("given", "words"),
    [({"replay": True}, "--use-replayssm"), ({"mode": "all"}, "--mamba-cache-mode is all")],
)
def test_other_layers_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        TreeSelectiveState.graft("layers.0", layer_of(**given), context())
    assert "--additional-config.graft.tree.topk to 1" in str(raised.value)


def metadata(**given: Any) -> Mamba2AttentionMetadata:
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
def test_prompts_are_a_batch_of_their_own(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of trees go to our kernels, the others to the layer, which is told of no decode."""
    seen: list[Any] = []
    mine = metadata()
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

    forward = SimpleNamespace(attn_metadata=known)
    monkeypatch.setattr(recurrent_layer, "get_forward_context", lambda: forward)
    monkeypatch.setattr(TreeSelectiveState, "_verify", verify)
    scan = TreeSelectiveState(layer_of(), shared, stock)
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


@pytest.mark.parametrize("given", [{"num_decodes": 0}, {"num_accepted_tokens": None}, None])
def test_batches_without_verified_rows_are_the_layer_s(
    given: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = None if given is None else {"layers.0": metadata(**given)}
    forward = SimpleNamespace(attn_metadata=known)
    monkeypatch.setattr(recurrent_layer, "get_forward_context", lambda: forward)
    seen: list[str] = []
    scan = TreeSelectiveState(layer_of(), context(), lambda *_: seen.append("stock"))
    scan(torch.zeros(1, 1), torch.zeros(1, 1))
    assert seen == ["stock"]
