"""One flag on a real engine: what ``graft: auto`` decides is what runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.answers.metrics_page import metrics_page
from tests.support.engines.pair_fixtures import TOKENS
from tests.support.engines.pairs import Answer, Pair, Request, answer_all, differing
from vllm_graft.base.errors import ConfigError
from vllm_graft.metrics import server_info
from vllm_graft.spec_decode.heads import hot_vocabulary
from vllm_graft.spec_decode.presets import tree_preset
from vllm_graft.testing import cpu_engine, model_runner, spec_metrics

pytestmark = pytest.mark.engine

GREEDY = {"max_tokens": TOKENS, "temperature": 0}


def speculator(pair: Pair, folder: Path, depth: int) -> Path:
    """The draft as a repository of the speculators project, which names its target and a depth."""
    draft = Path(pair.draft)
    layer = json.loads((draft / "config.json").read_text())
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
            "verifier": {"name_or_path": str(Path(pair.target).resolve())},
        },
        "draft_vocab_size": layer["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": layer["eagle_aux_hidden_state_layer_ids"],
        "norm_before_residual": layer.get("norm_before_residual", False),
        "transformer_layer_config": layer,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for file in draft.glob("*.safetensors"):
        (folder / file.name).symlink_to(file.resolve())
    return folder


@pytest.fixture
def many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft's 1,024 tokens count as many, and hot tokens be chosen at once."""
    monkeypatch.setattr(tree_preset, "HOT_SIZE", 1000)
    monkeypatch.setattr(tree_preset, "_LARGE_VOCABULARY", 1000)
    monkeypatch.setattr(hot_vocabulary, "PERIOD", 2)
    monkeypatch.setattr(hot_vocabulary, "LATE", 1)


@pytest.mark.usefixtures("many_tokens")
def test_auto_grows_trees_of_the_depth_and_answers_as_the_target(
    pair: Pair, samples: list[Request], expected: list[Answer], tmp_path: Path
) -> None:
    depth = 5
    model = speculator(pair, tmp_path, depth)
    with cpu_engine(model, additional_config={"graft": "auto"}) as llm:
        assert differing(answer_all(llm, samples), expected) == []
        metrics = spec_metrics(llm)
        [told] = llm.collective_rpc("graft_info")
        page = metrics_page()
        config = llm.llm_engine.vllm_config
        core: Any = llm.llm_engine.engine_core
        scheduler = core.engine_core.scheduler
        # The scheduler, its lookahead and the worker agree about the number of nodes.
        assert scheduler.num_spec_tokens == config.num_speculative_tokens == 63
        assert scheduler.num_lookahead_tokens == config.num_lookahead_tokens == 63
        assert model_runner(llm).speculator.num_speculative_steps == 63
        del core, scheduler
    assert told["parts"] == ["tree"]
    assert told["preset"]["name"] == "auto"
    assert "topk 8, steps 5" in told["preset"]["on"]["tree"]
    assert "hot_tokens 1000, ngram true" in told["preset"]["on"]["tree"]
    assert told["preset"]["off"].keys() == {"hicache"}
    assert told["counters"]["tree"]["nodes_verified"] > 0
    hot = told["counters"]["tree"]["hot_tokens"]
    assert 0 < server_info.total(page, "vllm:graft_tree_hot_steps_total") == hot["steps"]
    assert 0.98 < server_info.total(page, "vllm:graft_tree_hot_coverage") <= 1
    # A user of the server reads the same in /metrics.
    for part, state in (("tree", "on"), ("hicache", "off"), ("vit", "off"), ("draft", "off")):
        assert server_info.total(page, "vllm:graft_info", part=part, state=state) == 1
    [why] = [
        one.labels["detail"]
        for one in server_info.samples(page, "vllm:graft_info")
        if one.labels["part"] == "hicache"
    ]
    assert why == told["preset"]["off"]["hicache"]
    # More nodes than a chain of that depth has, and paths deeper than it from n-grams alone.
    assert metrics.draft_tokens > depth * metrics.drafts
    assert metrics.accepted_tokens > metrics.drafts
    deep = sum(metrics.accepted_per_position[depth:])
    assert deep <= told["counters"]["tree"]["ngrams"]["nodes_accepted"]


def test_what_trees_refuse_is_served_by_stock_and_told_why(
    pair: Pair, samples: list[Request], expected: list[Answer]
) -> None:
    """Negative control: named trees would stop this engine."""
    block = {"rejection_sample_method": "block"}
    greedy = [(one, answer) for one, answer in zip(samples, expected) if one.params == GREEDY][:2]
    with pair.engine(chain=3, speculative=block, additional_config={"graft": "auto"}) as llm:
        found = answer_all(llm, [request for request, _ in greedy])
        assert differing(found, [answer for _, answer in greedy]) == []
        [told] = llm.collective_rpc("graft_info")
        runner = model_runner(llm)
        assert runner.speculator.num_speculative_steps == 3
        assert "graft" not in type(runner.speculator).__module__
        del runner
    assert (told["parts"], told["preset"]["on"]) == ([], {})
    assert "rejection_sample_method is 'block'" in told["preset"]["off"]["tree"]


COPIED = [
    Request(text, {**GREEDY, "max_tokens": 32}) for text in ("pass\n" * 24, "import os\n" * 12)
]
ALSO: list[dict[str, Any]] = [
    {"seed": 7, "temperature": 0.5},
    {"temperature": 0, "logit_bias": {11: 3.0}},
    {"seed": 7, "min_p": 0.05},
]
"""Beside drafts that a user asks for, vLLM refuses the last two."""


def test_without_a_draft_model_auto_grows_trees_of_n_grams(pair: Pair) -> None:
    texts = [COPIED[0].prompt, pair.prompts[3]]
    others = [Request(text, {"max_tokens": 12, **each}) for text in texts for each in ALSO]
    with pair.engine() as llm:
        right = answer_all(llm, COPIED), answer_all(llm, others)
    # Only the user knows whether requests may learn of each other.
    asked = {"preset": "auto", "tree": {"memory": True}}
    auto: dict[str, Any] = {"additional_config": {"graft": asked}, "async_scheduling": True}
    with pair.engine(max_num_seqs=4, **auto) as llm:
        assert differing(answer_all(llm, COPIED), right[0]) == []
        accepted = spec_metrics(llm).accepted_tokens
        assert differing(answer_all(llm, others), right[1]) == []
        # The same prompts again: what was answered before is found in others' texts.
        assert differing(answer_all(llm, COPIED), right[0]) == []
        [told] = llm.collective_rpc("graft_info")
        config = llm.llm_engine.vllm_config
        assert type(model_runner(llm).speculator).__name__ == "NgramTrees"
    assert accepted > 24
    assert told["parts"] == ["tree"]
    assert "nodes of n-grams, and none where they don't pay" in told["preset"]["on"]["tree"]
    ngrams = told["counters"]["tree"]["ngrams"]
    assert ngrams["nodes_accepted"] >= accepted
    assert ngrams["memory"]["nodes_accepted"] > 0
    assert config.scheduler_config.async_scheduling
    assert config.speculative_config.method == "ngram_gpu"


@pytest.mark.parametrize("eager", [False, True])
def test_n_grams_that_are_taken_off_leave_stock_s_configuration(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, *, eager: bool
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from vllm_graft.spec_decode.tree_part import TreePart

    # A CPU has no graphs that could be planned.
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda _: True)

    def configured(**options: Any) -> Any:
        graphs: dict[str, Any] = {"cudagraph_mode": "NONE" if eager else "FULL_DECODE_ONLY"}
        args = EngineArgs(
            pair.target, max_num_seqs=8, enforce_eager=eager, compilation_config=graphs, **options
        )
        return args.create_engine_config()

    stock = configured()
    on = configured(additional_config={"graft": "auto"})
    assert on.speculative_config.method == "ngram_gpu"
    refuses = TreePart.refuses

    def late(self: Any, asked: Any, vllm_config: Any) -> Any:
        yield from refuses(self, asked, vllm_config)
        if vllm_config.compilation_config.cudagraph_capture_sizes is not None:
            yield "The configuration is complete."

    monkeypatch.setattr(TreePart, "refuses", late)
    found = configured(additional_config={"graft": "auto"})
    decided = found.additional_config["graft"]["decided"]
    assert decided["off"]["tree"] == "The configuration is complete."
    assert found.speculative_config is None
    sizes = [each.compilation_config.max_cudagraph_capture_size for each in (stock, found, on)]
    assert sizes[0] == sizes[1]
    assert (sizes[1] == sizes[2]) is eager
    for name in ("scheduler_config", "compilation_config", "cache_config", "kernel_config"):
        assert getattr(found, name) == getattr(stock, name), name


def test_the_flag_is_a_text_on_the_command_line() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for preset in ("auto", "latency", "throughput"):
        found = parser.parse_args(["--model", "x", "--additional-config.graft", preset])
        assert found.additional_config == {"graft": preset}


def test_layers_that_nobody_knows_leave_a_preset_with_vllm_s_own_chain(
    pair: Pair,
    samples: list[Request],
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The frontend turns trees on, and the worker finds out once it has loaded the model."""
    from vllm_graft.spec_decode.drafters.draft_trees import StockChain
    from vllm_graft.spec_decode.targets.dense.layer import DenseFamily

    monkeypatch.setattr(DenseFamily, "claims", lambda self, layer: False)
    greedy = [(one, answer) for one, answer in zip(samples, expected) if one.params == GREEDY][:3]
    with pair.engine(chain=3, additional_config={"graft": "auto"}) as llm:
        found = answer_all(llm, [request for request, _ in greedy])
        assert differing(found, [answer for _, answer in greedy]) == []
        metrics = spec_metrics(llm)
        [told] = llm.collective_rpc("graft_info")
        speculator = model_runner(llm).speculator
        assert isinstance(speculator, StockChain)
        assert type(speculator).__mro__[2].__name__ == "EagleSpeculator"
        core: Any = llm.llm_engine.engine_core
        assert set(core.engine_core.scheduler.dynamic_sd_lookup[1:]) == {3}
        del core, speculator
    assert (told["parts"], told["preset"]["on"]) == ([], {})
    assert "does not support layers like" in told["preset"]["off"]["tree"]
    assert "VLLM's own EagleSpeculator drafts chains of 3 tokens instead" in caplog.text
    # A chain of the depth that was asked for, and a head that drafts as well as ever.
    assert metrics.draft_tokens == 3 * metrics.drafts
    assert metrics.accepted_tokens > metrics.drafts / 2
    # Who names trees is not served by something else.
    refused = pytest.raises(ConfigError, match="does not support layers like")
    with refused, pair.engine(nodes=3, topk=2, steps=2):
        pass
