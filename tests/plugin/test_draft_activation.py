"""Graphs of a draft model run or are refused; vLLM's modules are fakes here."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.refusals import validate
from vllm_graft.base.errors import ConfigError, HookError, NotActiveError
from vllm_graft.config import GraftConfig
from vllm_graft.spec_decode import chain_part
from vllm_graft.spec_decode.chain_part import CHAINS
from vllm_graft.spec_decode.config.draft_config import DraftConfig

SPECULATOR = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"


@pytest.fixture
def config(vllm_config: Any) -> Any:
    """Make a stand-in for the configuration of an engine with a draft model."""
    vllm_config.additional_config = {"graft": {"draft": {}}}
    vllm_config.model_config.enforce_eager = False
    vllm_config.parallel_config.data_parallel_size = 1
    vllm_config.speculative_config.method = "draft_model"
    vllm_config.speculative_config.num_speculative_tokens = 5
    vllm_config.speculative_config.enforce_eager = None
    return vllm_config


@pytest.fixture
def vllm(fake_module: Any, unhooked_part: Any) -> Any:
    class StandaloneARSpeculator:
        def __init__(self, vllm_config: Any, device: str) -> None:
            self.device = device

    class ChainSpeculator(StandaloneARSpeculator):
        pass

    platform = SimpleNamespace(support_static_graph_mode=lambda: True, device_type="cuda")
    fake_module("vllm", __version__="0.32.0")
    fake_module("vllm.platforms", current_platform=platform)
    fake_module(SPECULATOR, StandaloneARSpeculator=StandaloneARSpeculator)
    fake_module("vllm_graft.spec_decode.drafters.standalone.chain", ChainSpeculator=ChainSpeculator)
    unhooked_part(chain_part, CHAINS)
    CHAINS.install()
    return SimpleNamespace(stock=StandaloneARSpeculator, chain=ChainSpeculator, platform=platform)


def verify(worker: Any, config: Any) -> None:
    """Check a worker as the front door does."""
    section = DraftConfig.from_vllm(config)
    if section is not None:
        CHAINS.verify(section, worker, config)


def worker_of(speculator: Any) -> Any:
    runner = SimpleNamespace(speculator=speculator, prompt_logprobs_worker=None)
    return SimpleNamespace(model_runner=runner)


def refusal(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(GraftConfig.parse(config.additional_config["graft"]), config)
    return str(caught.value)


def test_the_stock_class_builds_ours_where_it_is_asked_for(vllm: Any, config: Any) -> None:
    built = vllm.stock(config, "cuda")
    assert (type(built), built.device) == (vllm.chain, "cuda")
    verify(worker_of(built), config)
    config.additional_config = {}
    assert type(vllm.stock(config, "cuda")) is vllm.stock
    config.additional_config = {"graft": {"vit": {}}}
    assert type(vllm.stock(config, "cuda")) is vllm.stock


def test_installing_again_changes_nothing(vllm: Any) -> None:
    hooked = vllm.stock.__new__
    CHAINS.install()
    assert vllm.stock.__new__ is hooked


@pytest.mark.parametrize("runs", ["stock", "nothing"])
def test_a_worker_that_runs_something_else_stops(vllm: Any, config: Any, runs: str) -> None:
    asked = config.additional_config
    config.additional_config = {}
    speculator = vllm.stock(config, "cuda") if runs == "stock" else None
    verify(worker_of(speculator), config)
    config.additional_config = asked
    with pytest.raises(NotActiveError, match=r"graft\.draft asks for CUDA graphs"):
        verify(worker_of(speculator), config)


def test_what_will_run_is_told(vllm: Any, config: Any) -> None:
    draft = GraftConfig.parse({"draft": {}}).draft
    assert draft is not None
    said = CHAINS.describe(draft, config)
    assert "chain of 5; graph_runner cuda_graph (vllm-graft" in said
    other = GraftConfig.parse({"draft": {"graph_runner": "cuda_graf"}}).draft
    assert other is not None
    with pytest.raises(HookError, match=r"graft\.draft\.graph_runner.*Did you mean 'cuda_graph'"):
        CHAINS.describe(other, config)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"graft\.draft\.graphs: unknown key"):
        GraftConfig.parse({"draft": {"graphs": True}})


def test_the_stand_in_itself_is_served(vllm: Any, config: Any) -> None:
    validate(GraftConfig.parse({"draft": {}}), config)


MODE = "compilation_config.cudagraph_mode"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("speculative_config", None, '"method": "draft_model"'),
        ("speculative_config.method", "ngram", "is 'ngram'. |method to 'draft_model'"),
        ("speculative_config.method", "eagle3", "vLLM captures the loops of eagle, eagle3"),
        ("speculative_config.num_speculative_tokens", 1,
         "is 1. |is no loop: set speculative_config.num_"),
        ("speculative_config.parallel_drafting", True, "parallel_drafting"),
        ("speculative_config.enable_adaptive_verification", True, "enable_adaptive_verification"),
        ("speculative_config.enforce_eager", True, "speculative_config.enforce_eager is true"),
        ("use_v2_model_runner", False, "unset VLLM_USE_V2_MODEL_RUNNER"),
        ("model_config.enforce_eager", True, "--enforce-eager is given. It rules out all graphs"),
        (MODE, SimpleNamespace(name="PIECEWISE"), "cudagraph_mode is PIECEWISE"),
        (MODE, SimpleNamespace(name="NONE"), "cudagraph_mode is NONE"),
        ("parallel_config.data_parallel_size", 2, "-size is 2. |--data-parallel-size to 1"),
        ("parallel_config.pipeline_parallel_size", 2, "--pipeline-parallel-size is 2"),
        ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size is 2"),
        ("parallel_config.prefill_context_parallel_size", 2, "--prefill-context-parallel-size"),
        ("parallel_config.use_ubatching", True, "drop --enable-dbo and --ubatch-size"),
    ],
)  # fmt: skip
def test_refused(vllm: Any, config: Any, path: str, value: Any, words: str) -> None:
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, config)
    assert hasattr(owner, name)
    setattr(owner, name, value)
    message = refusal(config)
    assert message.startswith("--additional-config.graft.draft asks for CUDA graphs")
    assert [each for each in words.split("|") if each not in message] == []
    assert len(message.splitlines()) == 2


def test_a_platform_without_graphs_is_refused(vllm: Any, config: Any) -> None:
    vllm.platform.support_static_graph_mode = lambda: False
    assert "The platform cuda has no CUDA graphs" in refusal(config)


def test_beside_trees_it_is_refused(vllm: Any, config: Any) -> None:
    config.additional_config = {"graft": {"draft": {}, "tree": {}}}
    words = "graft.draft is given beside --additional-config.graft.tree. Graphs of a draft"
    assert words in refusal(config)
