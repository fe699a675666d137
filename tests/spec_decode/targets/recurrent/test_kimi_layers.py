"""Which layers of Kimi Linear get trees, and what is computed by them and what by us."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation import breakable_cudagraph
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

from tests.spec_decode.targets.recurrent.test_delta_layer import context, metadata, pretend
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.targets.latent.latent_layer import (
    TRITON,
    LatentFamily,
    TreeKimiLatents,
    graft_kimi_latents,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import KeptRows
from vllm_graft.spec_decode.targets.recurrent.recurrent_family import RecurrentFamily
from vllm_graft.spec_decode.targets.recurrent.recurrent_kinds import TreeKeyDecays
from vllm_graft.spec_decode.verification.context import VerifyMode


def of_class(kind: type, **attributes: Any) -> Any:
    """A layer whose constructor did not run."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def delta_layer(mode: str = "none") -> Any:
    return of_class(
        KimiGatedDeltaNetAttention,
        prefix="layers.0",
        cache_config=SimpleNamespace(mamba_cache_mode=mode),
        # As if a row's gate were what its norm adds.
        o_norm=lambda out, gate: out + gate,
    )


def latent_layer(backend: str = "TRITON_MLA", **given: Any) -> Any:
    chosen = SimpleNamespace(get_name=lambda: backend)
    usual = {"attn_backend": chosen, "kv_cache_dtype": "auto", "rotary_emb": None}
    return of_class(MultiHeadLatentAttention, layer_name="layers.1", **usual | given)


def unbroken(method: Callable[..., Any]) -> Any:
    """What is beneath the break of a PIECEWISE graph."""
    return getattr(method, "__wrapped__", method)


def test_each_family_claims_its_layers() -> None:
    assert RecurrentFamily().claims(delta_layer())
    assert not RecurrentFamily().claims(latent_layer())
    assert LatentFamily().claims(latent_layer())
    assert not LatentFamily().claims(delta_layer())


def test_layers_are_grafted() -> None:
    delta, latent = delta_layer(), latent_layer()
    RecurrentFamily().attach("layers.0", delta, context(), is_draft=False)
    LatentFamily().attach("layers.1", latent, context(), is_draft=False)
    assert isinstance(unbroken(delta._forward), TreeKeyDecays)
    assert isinstance(unbroken(latent._attention), TreeKimiLatents)
    assert unbroken(latent._attention).ops is TRITON


def test_other_states_are_refused() -> None:
    with pytest.raises(ConfigError, match="--mamba-cache-mode is all"):
        TreeKeyDecays.graft("layers.0", delta_layer("all"), context())


@pytest.mark.parametrize(
    ("given", "is_draft", "words"),
    [
        ({"backend": "FLASHINFER_MLA"}, False, "but layer layers.1 uses FLASHINFER_MLA"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, False, "--kv-cache-dtype fp8_ds_mla of layer layers.1"),
        ({"rotary_emb": object()}, False, "with rotations"),
        ({}, True, "of a draft"),
    ],
)
def test_other_latents_are_refused(given: dict[str, Any], is_draft: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        graft_kimi_latents("layers.1", latent_layer(**given), context(), is_draft=is_draft)


@pytest.mark.parametrize("form", ["states", "inputs"])
def test_prompts_are_a_batch_of_their_own(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of trees go to our kernels, the others to the layer; each row meets its own gate."""
    seen: list[Any] = []
    layer, mine, shared = delta_layer(), metadata(), context()
    known = {"layers.0": mine}
    shared.rows.row_parents[:10] = torch.tensor([-1, 0, 0, 9, 9, 9, 9, -1, 0, 1])
    shared.recurrent_form = form
    shared.kept = KeptRows.allocate(32, 16, "cpu") if form == "inputs" else None

    def stock(**given: Any) -> None:
        seen.append((known["layers.0"], given["mixed_qkv"][:, 0].tolist()))
        assert given["g1"].shape == (1, 4, 2, 3)
        assert given["beta"].shape == (1, 4, 2)
        given["core_attn_out"].copy_(layer.o_norm(torch.full((4, 2, 3), 20.0), given["g2"]))

    def verify(self: Any, own: Any, part: Any, out: Any) -> None:
        assert part.max_rows == (4 if form == "inputs" else 0)
        seen.append((part.rows, own["mixed_qkv"][:, 0].tolist()))
        assert own["g1"].shape == (6, 2, 3)
        assert own["beta"].shape == (6, 2)
        out.fill_(10.0)

    pretend(monkeypatch, known)
    monkeypatch.setattr(TreeKeyDecays, "_verify", verify)
    places = torch.arange(12.0)
    gates = places[:, None, None].expand(12, 2, 3)
    out = torch.full((1, 12, 2, 3), float("nan"))
    TreeKeyDecays(layer, shared, stock)(
        mixed_qkv=places[:, None].expand(12, 5),
        g1=gates[None],
        g2=gates,
        beta=gates[None, ..., 0],
        core_attn_out=out,
    )
    expected = [10, 11, 12, 23, 24, 25, 26, 17, 18, 19, 0, 0]
    assert out[0, :, 0, 0].tolist() == expected
    (rows, trees), (told, others) = seen
    assert rows.parents.tolist() == [-1, 0, 0, -1, 0, 1]
    assert trees == [0, 1, 2, 7, 8, 9]
    assert others == [3, 4, 5, 6]
    assert told.spec_sequence_masks is None
    assert known["layers.0"] is mine
    if shared.kept is not None:
        # By the first row of a request in the batch: its first row among those of trees.
        assert shared.kept.firsts.tolist()[:10] == [0, *[-1] * 6, 3, -1, -1]
        assert shared.kept.masks[:6].tolist() == [1, 3, 5, 1, 3, 7]


def test_inputs_have_the_model_s_dtype() -> None:
    """The convolution's weights are float32 in a model of 16 bits, too; gates are always."""
    layer, shared = delta_layer(), context()
    layer.conv1d = SimpleNamespace(weight=torch.zeros(3 * 2 * 16, 1, 4))
    layer.A_log = torch.zeros(2)
    layer.model_config = SimpleNamespace(dtype=torch.bfloat16)
    shared.recurrent_form = "states"
    TreeKeyDecays.graft("layers.0", layer, shared)
    assert unbroken(layer._forward).inputs is None
    shared.recurrent_form = "auto"
    TreeKeyDecays.graft("layers.0", layer, shared)
    inputs = unbroken(layer._forward).inputs
    assert (inputs.rows.dtype, inputs.rows.shape[1]) == (torch.bfloat16, 96)
    assert (inputs.gates.dtype, inputs.gates.shape[1:]) == (torch.float32, (17, 2))
    assert shared.kept_bytes == inputs.nbytes > 0


def test_a_batch_of_trees_passes_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"num_prefills": 0, "num_prefill_tokens": 0, "num_actual_tokens": 6}
    pretend(monkeypatch, {"layers.0": metadata(**given)})
    monkeypatch.setattr(TreeKeyDecays, "_verify", lambda *given: given[-1].fill_(10.0))
    gates = torch.arange(8.0)[:, None, None].expand(8, 2, 3)
    out = torch.full((1, 8, 2, 3), float("nan"))
    TreeKeyDecays(delta_layer(), context(), pytest.fail)(
        torch.zeros(8, 5), gates[None], gates, gates[None, ..., 0], out
    )
    # Padding behind the rows is finite.
    assert out[0, :, 0, 0].tolist() == [10, 11, 12, 13, 14, 15, 6, 7]


@pytest.mark.parametrize("given", [{"spec_sequence_masks": None}, None])
def test_batches_without_verified_rows_are_the_layer_s(
    given: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, None if given is None else {"layers.0": metadata(**given)})
    seen: list[str] = []
    none = torch.zeros(1, 1, 1)
    rule = TreeKeyDecays(delta_layer(), context(), lambda **_: seen.append("stock"))
    rule(mixed_qkv=none, g1=none, g2=none, beta=none, core_attn_out=none)
    assert seen == ["stock"]


@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        (VerifyMode.NONE, ["stock"]),
        (VerifyMode.MIXED, ["stock", "trees"]),
        (VerifyMode.ALL, ["write", "trees"]),
    ],
)
def test_who_writes_latents_and_who_attends(
    mode: VerifyMode, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that computes all rows has written their latents; else its operation does."""
    seen: list[str] = []
    layer = latent_layer(qk_nope_head_dim=4, qk_rope_head_dim=2, kv_lora_rank=3)
    layer.W_UK_T, layer.kv_cache = torch.ones(2, 4, 3), torch.zeros(1, 1, 5)

    def write(*given: Any) -> None:
        seen.append("write")
        assert given[-1].tolist() == [7, 8, 9]
        assert [len(each) for each in given[:4]] == [3] * 4

    layer._decode_concat_cache = write
    shared = context()
    shared.mode = mode
    own = SimpleNamespace(num_reqs=1, num_actual_tokens=3, prefill=None)
    own.decode = SimpleNamespace(block_table=torch.zeros(1, 1))
    shared.step = SimpleNamespace(  # type: ignore[assignment]
        batch=SimpleNamespace(
            num_draft_tokens_per_req=torch.tensor([2]).numpy(),
            num_scheduled_tokens=torch.tensor([3]).numpy(),
        )
    )
    pretend(monkeypatch, {"layers.1": own}, {"layers.1": torch.arange(7, 12)})
    monkeypatch.setattr(TreeKimiLatents, "verify", lambda *_: seen.append("trees"))
    trees = TreeKimiLatents(layer, shared, TRITON, lambda *_: seen.append("stock"))
    trees(torch.zeros(5), torch.zeros(5, 2, 6), torch.zeros(5, 3), torch.zeros(5, 1, 2), None)
    assert seen == steps


def test_a_run_without_attention_is_the_layer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    shared = context()
    shared.mode = VerifyMode.ALL
    pretend(monkeypatch, None)
    trees = TreeKimiLatents(latent_layer(), shared, TRITON, lambda *_: seen.append("stock"))
    none: Any = None
    trees(none, none, none, none, none)
    assert seen == ["stock"]


@pytest.mark.parametrize("breakable", [True, False])
def test_passes_interrupt_piecewise_graphs(
    breakable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a batch is, is known when a graph is replayed: our passes run then, in no graph."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", str(int(breakable)))
    delta, latent = delta_layer(), latent_layer()
    TreeKeyDecays.graft("layers.0", delta, context())
    graft_kimi_latents("layers.1", latent, context(), is_draft=False)
    postponed: list[Callable[[], None]] = []
    capture = SimpleNamespace(_capturing=True, add_eager=postponed.append)
    monkeypatch.setattr(breakable_cudagraph.BreakableCUDAGraphCapture, "current", lambda: capture)
    monkeypatch.setattr(breakable_cudagraph, "_weak_ref_capture_arg", lambda value: value)
    seen: list[str] = []
    unbroken(delta._forward).stock = lambda **_: seen.append("KDA")
    unbroken(latent._attention).stock = lambda *_: seen.append("MLA")
    pretend(monkeypatch, None)
    none = torch.zeros(1, 1, 1)
    delta._forward(mixed_qkv=none, g1=none, g2=none, beta=none, core_attn_out=none)
    latent._attention(none, none, none, none, none)
    assert seen == ([] if breakable else ["KDA", "MLA"])
    for step in postponed:
        step()
    assert seen == ["KDA", "MLA"]
