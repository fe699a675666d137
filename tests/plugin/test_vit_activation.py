"""Vision graphs run, or the engine says why not; vLLM's modules are fakes here."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.refusals import validate
from vllm_graft.base import info
from vllm_graft.base.errors import ConfigError, HookError, NotActiveError
from vllm_graft.config import GraftConfig
from vllm_graft.graph_runners.vision import vision_part
from vllm_graft.graph_runners.vision.vision_config import VitConfig
from vllm_graft.graph_runners.vision.vision_part import VISION
from vllm_graft.hooks.entries import VisionAdapter, VitGraphRunner

MANAGER = "vllm.v1.worker.encoder_cudagraph"
V2 = "vllm.v1.worker.gpu.model_states.interface"
V1 = "vllm.v1.worker.gpu_model_runner"


@pytest.fixture
def unhooked(fake_module: Any, unhooked_part: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake vLLM of one test."""

    class EncoderCudaGraphManager:
        def __init__(self, vllm_config: Any, device: str, dtype: str, model: Any) -> None:
            self.model = model

    class Runner(EncoderCudaGraphManager):
        pass

    class ModelState:
        def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: str) -> None:
            found = None
            if getattr(model, "speaks", False) and encoder_cache is not None:
                given = {"vllm_config": vllm_config, "device": device, "dtype": "bf16"}
                found = EncoderCudaGraphManager(**given, model=model)
            self.encoder_runner = SimpleNamespace(cudagraph_manager=found)

    class GPUModelRunner:
        supports_mm_inputs = True

        def __init__(self, vllm_config: Any, model: Any) -> None:
            self.vllm_config, self.model = vllm_config, model

        def get_model(self) -> Any:
            return self.model

        def _create_encoder_cudagraph_manager(self) -> Any:
            return EncoderCudaGraphManager(self.vllm_config, "cuda", "bf16", self.model)

    class Adapter:
        @classmethod
        def refuses(cls, model: Any) -> str | None:
            return getattr(model, "refused", None)

        def __init__(self, model: Any, vllm_config: Any) -> None:
            pass

    fake_module("vllm", __version__="0.32.0")
    graphs = SimpleNamespace(support_static_graph_mode=lambda: True, device_type="cuda")
    fake_module("vllm.platforms", current_platform=graphs)
    fake_module(MANAGER, EncoderCudaGraphManager=EncoderCudaGraphManager)
    fake_module(V2, ModelState=ModelState)
    fake_module(V1, GPUModelRunner=GPUModelRunner)
    fake_module(
        "vllm.model_executor.models.interfaces",
        supports_encoder_cudagraph=lambda model: getattr(model, "speaks", False),
    )
    fake_module(
        "vllm_graft.graph_runners.vision.towers.adapter",
        VisionAdapter=Adapter,
        attach=lambda model, adapter: setattr(model, "speaks", True),
    )
    entries = {
        "graft_vit_graph_runners": [VitGraphRunner("cuda_graph", lambda: Runner, "")],
        "graft_vision_adapters": [VisionAdapter("Adapted", lambda: Adapter, "")],
    }
    plugins = unhooked_part(vision_part, VISION)
    monkeypatch.setattr(plugins, "_entries", lambda hook, provider: entries.get(hook, []))
    classes = {"stock": EncoderCudaGraphManager, "runner": Runner, "v1": GPUModelRunner}
    return SimpleNamespace(**classes, state=ModelState, entries=entries, platform=graphs)


@pytest.fixture
def vllm(unhooked: Any) -> Any:
    VISION.install()
    return unhooked


class Adapted(SimpleNamespace):
    """A model that does not speak the protocol, and has an adapter."""


class Unknown(SimpleNamespace):
    """A model that does not speak the protocol."""


@pytest.fixture
def config(vllm_config: Any) -> Any:
    vllm_config.additional_config = {"graft": {"vit": {}}}
    vllm_config.speculative_config = None
    vllm_config.model_config.multimodal_config = SimpleNamespace(language_model_only=False)
    vllm_config.model_config.enforce_eager = False
    vllm_config.model_config.architectures = ["FromTheCheckpoint"]
    return vllm_config


def verify(worker: Any, config: Any) -> None:
    """Check a worker as the front door does."""
    section = VitConfig.from_vllm(config)
    if section is not None:
        VISION.verify(section, worker, config)


def worker(model_runner: Any) -> Any:
    return SimpleNamespace(model_runner=model_runner)


def test_the_stock_class_builds_the_chosen_one(vllm: Any, config: Any) -> None:
    VISION.install()
    model = SimpleNamespace(speaks=True)
    state = vllm.state(config, model, object(), "cuda")
    assert type(state.encoder_runner.cudagraph_manager) is vllm.runner
    verify(worker(SimpleNamespace(model_state=state)), config)
    assert type(vllm.v1(config, model)._create_encoder_cudagraph_manager()) is vllm.runner


def test_without_our_key_nothing_changes(vllm: Any, config: Any) -> None:
    config.additional_config = {}
    model = Adapted()
    assert vllm.state(config, model, object(), "cuda").encoder_runner.cudagraph_manager is None
    assert not hasattr(model, "speaks")
    assert type(vllm.v1(config, model)._create_encoder_cudagraph_manager()) is vllm.stock
    verify(worker(None), config)


def test_a_model_without_the_protocol_gets_its_adapter(vllm: Any, config: Any) -> None:
    state = vllm.state(config, Adapted(), object(), "cuda")
    assert type(state.encoder_runner.cudagraph_manager) is vllm.runner
    model = Adapted()
    runner = vllm.v1(config, model)
    verify(worker(runner), config)
    assert model.speaks
    config.model_config.architectures = ["Adapted"]
    vision_part.adapt(Unknown(), config)


def test_a_model_without_an_adapter_is_refused(vllm: Any, config: Any) -> None:
    with pytest.raises(ConfigError, match=r"Unknown does not speak .*\(there are: Adapted\)"):
        vllm.state(config, Unknown(), object(), "cuda")
    with pytest.raises(ConfigError, match="Unknown does not speak"):
        verify(worker(vllm.v1(config, Unknown())), config)
    with pytest.raises(ConfigError, match=r"graft\.vit: Adapted .* as its tower is odd: drop"):
        vllm.state(config, Adapted(refused="its tower is odd"), object(), "cuda")


def by_preset(config: Any) -> Any:
    """The same section, but nobody named it."""
    decided = {"preset": "auto", "on": {"vit": "vision graphs"}, "off": {}}
    config.additional_config = {"graft": {"vit": {}, "decided": decided}}
    return config


@pytest.mark.parametrize("model", [Unknown(), Adapted(refused="its tower is odd")])
def test_a_preset_leaves_a_model_that_is_refused_as_it_is(
    vllm: Any, config: Any, model: Any
) -> None:
    info.clear()
    state = vllm.state(by_preset(config), model, object(), "cuda")
    assert state.encoder_runner.cudagraph_manager is None
    assert not hasattr(model, "speaks")
    verify(worker(SimpleNamespace(model_state=state)), config)
    reason = info.declined()["vit"]
    assert "Unknown does not speak" in reason or "its tower is odd" in reason
    info.clear()
    verify(worker(vllm.v1(config, model)), config)
    assert info.declined()["vit"] == reason
    info.clear()


def test_a_preset_notes_a_worker_that_encodes_otherwise(vllm: Any, config: Any) -> None:
    info.clear()
    verify(worker(SimpleNamespace(is_first_pp_rank=True)), by_preset(config))
    assert "asks for vision graphs, but" in info.declined()["vit"]
    info.clear()


def test_an_adapter_of_a_data_parallel_tower_is_refused(vllm: Any, config: Any) -> None:
    multimodal = config.model_config.multimodal_config
    config.parallel_config = SimpleNamespace(tensor_parallel_size=2)
    multimodal.mm_encoder_tp_mode = "weights"
    vllm.state(config, Adapted(), object(), "cuda")
    multimodal.mm_encoder_tp_mode = "data"
    with pytest.raises(ConfigError, match=r"Adapted .* data spreads images over 2 ranks"):
        vllm.state(config, Adapted(), object(), "cuda")
    # The protocol itself spreads a model that speaks it.
    vllm.state(config, SimpleNamespace(speaks=True), object(), "cuda")
    config.parallel_config.tensor_parallel_size = 1
    vllm.state(config, Adapted(), object(), "cuda")


def test_a_worker_that_encodes_otherwise_stops(unhooked: Any, config: Any) -> None:
    state = unhooked.state(config, SimpleNamespace(speaks=True), object(), "cuda")
    for runner in (SimpleNamespace(model_state=state), SimpleNamespace(), None):
        with pytest.raises(NotActiveError, match=r"graft\.vit asks for vision graphs"):
            verify(worker(runner), config)
    later = SimpleNamespace(is_first_pp_rank=False)
    verify(worker(later), config)


def test_what_hooks_give_is_checked(vllm: Any, config: Any) -> None:
    vllm.entries["graft_vit_graph_runners"] = [VitGraphRunner("cuda_graph", lambda: dict, "")]
    with pytest.raises(HookError, match="must be a subclass of vLLM's EncoderCudaGraphManager"):
        vllm.state(config, SimpleNamespace(speaks=True), object(), "cuda")
    vllm.entries["graft_vision_adapters"] = [VisionAdapter("Adapted", lambda: dict, "")]
    with pytest.raises(HookError, match="must be a subclass of VisionAdapter"):
        vllm.state(config, Adapted(), object(), "cuda")


def test_the_frontend_turns_vllms_graphs_on(vllm: Any, config: Any) -> None:
    said = VISION.describe(GraftConfig.parse({"vit": {}}).vit, config)  # type: ignore[arg-type]
    assert config.compilation_config.cudagraph_mm_encoder is True
    assert said.startswith("vision graphs in 512 MiB; runner cuda_graph (vllm-graft")


def serve(config: Any) -> None:
    validate(GraftConfig.parse({"vit": {}}), config)


def refusal(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        serve(config)
    return str(caught.value)


def test_what_the_frontend_refuses(vllm: Any, config: Any) -> None:
    serve(config)
    config.model_config.enforce_eager = True
    assert "--enforce-eager" in refusal(config)
    config.model_config.enforce_eager = False
    config.model_config.multimodal_config.language_model_only = True
    assert "--language-model-only" in refusal(config)
    config.model_config.multimodal_config = None
    assert "takes text only" in refusal(config)
    config.model_config.multimodal_config = SimpleNamespace(language_model_only=False)
    config.compilation_config.cudagraph_mode = SimpleNamespace(name="NONE")
    serve(config)
    config.use_v2_model_runner = False
    assert "cudagraph_mode is NONE" in refusal(config)
    vllm.platform.support_static_graph_mode = lambda: False
    assert "The platform cuda has no CUDA graphs" in refusal(config)


def test_a_drafts_configuration_is_judged_by_its_target(vllm: Any, config: Any) -> None:
    target = config.model_config
    config.speculative_config = SimpleNamespace(target_model_config=target)
    config.model_config = SimpleNamespace(multimodal_config=None, enforce_eager=False)
    serve(config)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("memory", 8, r"vit\.memory: 8 is refused.*Allowed: 32 to 65536"),
        ("max_patches", 1, r"vit\.max_patches: 1 is refused"),
        ("capture_share", 2, r"vit\.capture_share: 2 is refused.*Allowed: 0(\.0)? to 1"),
        ("buckets", ["a"], r"vit\.buckets"),
        ("memmory", 8, r"vit\.memmory: unknown key\. Did you mean 'memory'"),
    ],
)
def test_wrong_keys(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GraftConfig.parse({"vit": {key: value}})


@pytest.mark.parametrize(
    ("name", "speaks", "words"),
    [
        ("Unknown", False, "Unknown does not speak vLLM's encoder protocol, and no entry"),
        ("Unknown", True, ""),
        ("Adapted", False, ""),
    ],
)
def test_a_model_without_an_adapter_is_foreseen(
    vllm: Any, config: Any, fake_module: Any, name: str, speaks: bool, words: str
) -> None:
    registry = SimpleNamespace(_run_in_subprocess=lambda look: (name, speaks))
    fake_module("vllm.model_executor.models", registry=registry)
    said = " ".join(VISION.foresees(VitConfig(), config))
    assert words in said
    assert bool(said) == bool(words)
