"""The additions to the engine's model state, and the families of targets that bring them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode

from tests.support import toy_family
from tests.support.samples.attention_samples import (
    TOLERANCE,
    AttentionShape,
    tree_problem,
    untouched,
)
from tests.support.samples.drafted_batches import DEVICE, drafted_batch, drafted_context
from vllm_graft import doctor
from vllm_graft.base.errors import ConfigError, EntryError, HookError
from vllm_graft.hooks import manager
from vllm_graft.hooks.entries import TargetFamily
from vllm_graft.spec_decode.refusals.tree_refusals import refusals
from vllm_graft.spec_decode.targets import families
from vllm_graft.spec_decode.targets.dense import layer as dense_layer
from vllm_graft.spec_decode.targets.dense.layer import DenseFamily
from vllm_graft.spec_decode.targets.dense.plain_attention import tree_attention_reference
from vllm_graft.spec_decode.targets.families import Served, ServedLayers, UnchangedFamily
from vllm_graft.spec_decode.targets.model_state import TreeModelState, samples_by_temperature
from vllm_graft.spec_decode.verification.context import TreeContext, VerifyMode, VerifyStep

NODES = 4


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ({}, True),
        ({"temperature": 0.3, "seed": 4, "logprobs": 2, "stop": ["x"], "top_k": -1}, True),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, True),
        ({"top_k": 3}, False),
        ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"temperature": 0.0, "min_tokens": 4}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"allowed_token_ids": [1, 2]}, False),
        ({"repetition_penalty": 0.9}, False),
    ],
)
def test_temperature_alone(changes: dict[str, Any], alone: bool) -> None:
    assert samples_by_temperature(SamplingParams(**changes)) is alone
    state = make_state(drafted_context())
    state.add_request(1, SimpleNamespace(sampling_params=SamplingParams(**changes)))
    assert state.graft.by_temperature.tolist() == [False, alone, False, False]


def test_pooling_is_not_sampled() -> None:
    assert samples_by_temperature(None) is False


class Base:
    """Stands for vLLM's ModelState."""

    rope_state: Any = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.vllm_config: Any = SimpleNamespace()
        self.device = torch.device(DEVICE)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        self.calls.append("add_request")

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        self.calls.append("initialize_kv_cache")

    def preprocess_state(self, *args: Any) -> None:
        self.calls.append("preprocess_state")

    def postprocess_state(self, *args: Any) -> None:
        self.calls.append("postprocess_state")

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        self.calls.append("prepare_inputs")
        return {"positions": torch.arange(30, device=DEVICE).view(3, 10)} if self.rope_state else {}

    def prepare_attn(
        self, input_batch: Any, mode: Any, *args: Any, for_capture: bool = False, **kwargs: Any
    ) -> Any:
        self.calls.append("prepare_attn")
        return {"args": args, "for_capture": for_capture, **kwargs}


def make_state(context: TreeContext, rope: bool = False, layers: tuple[str, ...] = ()) -> Any:
    served = ServedLayers({}, ())
    served._families = dict.fromkeys(layers, DenseFamily())
    bound = TreeModelState.bind(context, served)
    state = type("State", (bound, Base), {})()
    state.rope_state = object() if rope else None
    return state


def make_batch(drafts: list[int], plain: int = 0) -> Any:
    """Make requests with a root and drafts each; the first has `plain` more rows before them."""
    lengths = [1 + count for count in drafts]
    lengths[0] += plain
    return drafted_batch(lengths, drafts, padding=1)


@pytest.mark.parametrize("rope", [False, True])
def test_depths_are_carried_over_to_dimensional_positions(rope: bool) -> None:
    context = drafted_context()
    state = make_state(context, rope)
    batch = make_batch([4, 4])
    num_computed = torch.tensor([50, 60, 0, 0], dtype=torch.int32, device=DEVICE)
    batch.positions[:] = torch.tensor([*range(50, 55), *range(60, 65)])
    state.preprocess_state(batch, (), None, num_computed)
    depths = [0, 1, 1, 2, 2]
    assert batch.positions.tolist() == [50 + d for d in depths] + [60 + d for d in depths]
    inputs = state.prepare_inputs(batch, None)
    shift = [depth - i for i, depth in enumerate(depths)] * 2
    if rope:
        expected = torch.arange(30).view(3, 10) + torch.tensor(shift)
        assert inputs["positions"].tolist() == expected.tolist()
    else:
        assert inputs == {}
        assert context.step is not None
        assert context.step.depth_shift is None


def test_another_batch_s_positions_stay() -> None:
    context = drafted_context()
    state = make_state(context, rope=True)
    state.preprocess_state(
        make_batch([4, 4]), (), None, torch.zeros(4, dtype=torch.int32, device=DEVICE)
    )
    # A dummy run of data parallelism prepares inputs between two steps.
    inputs = state.prepare_inputs(make_batch([0, 0]), None)
    assert inputs["positions"].tolist() == torch.arange(30).view(3, 10).tolist()


@pytest.mark.parametrize("graph", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE])
def test_attention_is_prepared_for_the_mode(graph: CUDAGraphMode) -> None:
    context = drafted_context()
    state = make_state(context)
    options = {"for_capture": False, "ubatch_idx": 1}
    assert state.prepare_attn(make_batch([4, 0]), graph, "tables", **options) == {
        "args": ("tables",),
        **options,
    }
    assert context.mode is VerifyMode.MIXED
    assert context.counters.mixed_replays == (graph is CUDAGraphMode.FULL)


def test_the_target_s_layers_are_compacted_with_their_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = drafted_context()
    state = make_state(context, layers=("a", "b", "d"))
    caches = {
        name: SimpleNamespace(
            kv_cache=torch.zeros(4, 1, 16, 8, device=DEVICE), kv_sharing_target_layer_name=None
        )
        for name in "abcd"
    }
    # It reads the K/V of another, which must not be moved twice.
    caches["d"].kv_sharing_target_layer_name = "a"
    state.vllm_config.compilation_config = SimpleNamespace(static_forward_context=caches)
    groups = [SimpleNamespace(layer_names=["c", "a", "d"]), SimpleNamespace(layer_names=["b"])]
    tables = SimpleNamespace(slot_mappings=torch.zeros(2, 32))
    state.initialize_kv_cache(SimpleNamespace(kv_cache_groups=groups), tables)
    expected = [caches["a"].kv_cache.data_ptr(), caches["b"].kv_cache.data_ptr()]
    [dense] = state.target_states
    assert dense.table.bases.tolist() == expected
    assert dense.table.layout[:, 6].tolist() == [0, 1]

    compacted: list[Any] = []
    monkeypatch.setattr(dense_layer, "compact_kv", lambda *args, **kwargs: compacted.append(args))
    batch = make_batch([4, 4])
    state.postprocess_state(batch.idx_mapping, None)
    context.step = VerifyStep(batch, batch.cu_num_logits.diff() - 1)
    # This pass has no verification.
    state.postprocess_state(batch.idx_mapping, None)
    assert not compacted
    context.step.num_sampled = torch.tensor([2, 1])
    state.postprocess_state(batch.idx_mapping, context.step.num_sampled)
    [(table, path, num_sampled, *_, slots)] = compacted
    assert table is dense.table
    assert path is context.path
    assert num_sampled is context.step.num_sampled
    assert slots is tables.slot_mappings

    # Memory profiling makes a small cache first; the real one replaces it.
    for layer in caches.values():
        layer.kv_cache = torch.zeros(8, 1, 16, 8, device=DEVICE)
    state.initialize_kv_cache(SimpleNamespace(kv_cache_groups=groups), tables)
    [dense] = state.target_states
    assert dense.table.bases.tolist() != expected


def test_foreign_logits_processors_are_refused() -> None:
    class Foreign: ...

    Foreign.__module__ = "somebody.processors"
    ours = type("Known", (), {"__module__": "vllm.v1.worker.gpu.sample.penalties"})
    state = make_state(drafted_context())
    state.vllm_config.speculative_config = SimpleNamespace(
        num_speculative_tokens=NODES,
        enable_adaptive_verification=False,
        rejection_sample_method="standard",
    )
    sampler = SimpleNamespace(
        logits_processors=[ours()], thinking_budget_state=SimpleNamespace(apply=None)
    )
    assert state.custom_sampler(sampler)[0] is sampler
    sampler.logits_processors.append(Foreign())
    with pytest.raises(ConfigError, match=r"somebody\.processors\..*Foreign may read"):
        state.custom_sampler(sampler)


class Recorded:
    """A family that claims layers of one kind, and records what it is given."""

    def __init__(self) -> None:
        self.attached: list[tuple[str, bool]] = []

    def claims(self, layer: Any) -> bool:
        return bool(layer.kind == "known")

    def attach(self, name: str, layer: Any, context: Any, *, is_draft: bool) -> None:
        self.attached.append((name, is_draft))

    def state(self, layers: Any, *args: Any) -> Any:
        return sorted(layers)


def layer(kind: str) -> Any:
    impl = SimpleNamespace(sliding_window=None, sinks=None, alibi_slopes=None)
    return SimpleNamespace(
        kind=kind, impl=impl, kv_sharing_target_layer_name=None, head_size=8, head_size_v=8
    )


LAYERS = {"draft": layer("known"), "one": layer("known"), "two": layer("unknown")}


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setattr(families, "families", lambda: [Served(found, ())])
    return found


def test_a_chain_leaves_all_layers_of_the_target_alone(family: Recorded) -> None:
    served = ServedLayers(LAYERS, ["draft"], chain=True)
    served.attach(SimpleNamespace())
    assert family.attached == [("draft", True)]
    assert list(served.attending) == ["draft"]
    [state] = served.states(LAYERS, None, None)  # type: ignore[arg-type]
    # It has nothing to do, before a pass and after one.
    assert (state.fork(None), state.commit(None, None)) == (None, None)  # type: ignore[arg-type]


def test_a_tree_needs_a_family_for_each_layer(family: Recorded) -> None:
    """Negative control."""
    with pytest.raises(ConfigError, match="does not support layers like two"):
        ServedLayers(LAYERS, ["draft"])
    served = ServedLayers({name: LAYERS[name] for name in ("draft", "one")}, ["draft"])
    served.attach(SimpleNamespace())
    assert family.attached == [("draft", True), ("one", False)]
    assert served.states(LAYERS, None, None) == [["one"]]  # type: ignore[arg-type]


def test_a_draft_of_unknown_layers_is_refused_in_a_chain_too(family: Recorded) -> None:
    with pytest.raises(ConfigError, match="does not support layers like two"):
        ServedLayers(LAYERS, ["two"], chain=True)


def test_a_chain_s_family_claims_everything() -> None:
    assert UnchangedFamily().claims(object())


def test_the_kernel_equals_the_reference() -> None:
    shape = AttentionShape((7, 0, 4, 1), (60, 9, 33, 1), kv_heads=2, group=2, head_size=32)
    batch = tree_problem(shape, "cpu")
    found, expected = untouched(batch.query), untouched(batch.query)
    toy_family.toy_attention(batch, found)
    tree_attention_reference(batch, expected)
    near = TOLERANCE[torch.float32]
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_its_rows_are_found(plugin: Any) -> None:
    ours = [row.what for row in refusals()]
    plugin(toy_family)
    theirs = [row.what for row in refusals()]
    assert [what for what in theirs if what not in ours] == ["toys with many children"]
    assert [what for what in theirs if what in ours] == ours
    [found] = doctor._seams_of_families(manager.manager())
    assert found.ok
    assert found.check.startswith("seam of toy")


@pytest.mark.parametrize("key", ["refusals", "seams"])
def test_rows_that_are_nowhere_are_refused(key: str) -> None:
    with pytest.raises(HookError, match=f"TargetFamily 'toy': {key}='rows' must read"):
        TargetFamily("toy", "toy:Family", "", **{key: "rows"})
    entry = TargetFamily("toy", "toy:Family", "", **{key: "tests.support.toy_family:GONE"})
    with pytest.raises(EntryError, match="'toy' cannot be loaded from"):
        getattr(entry, f"own_{key}")()
