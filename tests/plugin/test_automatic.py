"""``graft: auto``: what is decided for which configuration; vLLM's platform is a fake here."""

import contextlib
import copy
import functools
import importlib.metadata
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# Some tests replace the module `vllm`, behind which a preset asks this one for a state's bytes.
import vllm.model_executor.layers.mamba.mamba_utils  # noqa: F401

from tests.support.checkpoints import write_vocabulary
from tests.support.platforms import platform
from vllm_graft import activation, automatic
from vllm_graft.base import info, log
from vllm_graft.base.decision import Decision, decline_or_raise, gave_drafts, told
from vllm_graft.base.errors import ConfigError, NotActiveError
from vllm_graft.base.refusal import facts
from vllm_graft.config import GraftConfig
from vllm_graft.parts import PARTS
from vllm_graft.spec_decode.config.tree_config import MemoryConfig


@pytest.fixture
def config(vllm_config: Any, on: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An EAGLE-3 chain of 7 tokens, and ``--additional-config.graft auto``, on a Hopper."""
    for name in ("refused", "unfit"):
        monkeypatch.setattr(automatic, name, lambda *_: "")
    log.info_once.cache_clear()
    log.warning_once.cache_clear()
    info.clear()
    on(platform())
    change(
        vllm_config,
        {
            "additional_config": {"graft": "auto"},
            "model_config.enforce_eager": False,
            "model_config.max_model_len": 8192,
            "model_config.multimodal_config": None,
            "model_config.is_mm_prefix_lm": False,
            "model_config.verify_with_parallel_config": lambda parallel: None,
            "scheduler_config.scheduler_cls": None,
            "compilation_config.cudagraph_mm_encoder": False,
            "lora_config": None,
            "_maybe_disable_dynamic_sd_for_data_parallel": lambda: None,
            "speculative_config.num_speculative_tokens": 7,
            "speculative_config.enforce_eager": None,
            "speculative_config.attention_backend": None,
        },
    )
    vllm_config.speculative_config.draft_model_config = SimpleNamespace(
        **{**vars(vllm_config.model_config), "hf_text_config": SimpleNamespace()},
        hf_config=SimpleNamespace(draft_vocab_size=32_000),
        dtype="torch.bfloat16",
        model="draft",
        revision=None,
    )
    return vllm_config


Changes = dict[str, Any]
"""Values by their dotted paths within vLLM's configuration."""


def change(config: Any, changes: Changes) -> None:
    for path, value in changes.items():
        *parents, name = path.split(".")
        setattr(functools.reduce(getattr, parents, config), name, value)


def start(config: Any) -> Any:
    """Call both hooks as vLLM does; return the decisions."""
    activation.on_defaults(config)
    activation.on_config(config)
    return Decision.from_vllm(config)


def drafts(config: Any) -> Any:
    return config.speculative_config.num_speculative_tokens


def tree_of(config: Any) -> Any:
    return config.additional_config["graft"].get("tree")


def own_sentences(name: str, config: Any) -> str:
    """What the part says to somebody who names it."""
    part = next(part for part in PARTS if part.name == name)
    named = copy.copy(config)
    named.additional_config = {"graft": {name: {}}}
    return facts(part.refuses(part.section(GraftConfig.from_vllm(named), named), named))


def test_a_tree_is_on_and_its_values_are_filled_in(config: Any) -> None:
    decided = start(config)
    assert tree_of(config) == {
        "topk": 8, "steps": 7, "nodes": 63, "shape": "auto", "head_dtype": "fp8",
        "ngram": {},
    }  # fmt: skip
    speculative = config.speculative_config
    assert speculative.num_speculative_tokens == 63
    assert max(nodes for _, _, nodes in speculative.num_speculative_tokens_per_batch_size) == 63
    assert decided.on == {
        "tree": "trees of up to 63 nodes: topk 8, steps 7 (from num_speculative_tokens), shape "
        "auto, head_dtype fp8, ngram true"
    }
    assert config.parallel_config.worker_extension_cls == "vllm_graft.WorkerExtension"


def test_what_is_off_says_its_own_refusal(config: Any) -> None:
    config.model_config.multimodal_config = SimpleNamespace(language_model_only=True)
    before = copy.deepcopy(config)
    off = start(config).off
    # The model has a tower, and no draft model.
    assert off.keys() == {"hicache", "vit"}
    assert off["vit"] == own_sentences("vit", before)
    assert off["vit"] == "--language-model-only is given. There is no encoder to capture."
    assert "add --kv-transfer-config" in off["hicache"]
    assert '"host_bytes"' in off["hicache"]


def test_each_decision_is_one_line(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.graft"):
        decided = start(config)
        start(config)
    said = [record.getMessage() for record in caplog.records]
    lines = [line for line in said if "--additional-config.graft auto: " in line]
    assert len(lines) == len(decided.on) + len(decided.off) == 2
    for part, says in decided.on.items():
        assert sum(f"{part} on: {says}" in line for line in lines) == 1
    for part, reason in decided.off.items():
        assert sum(f"{part} off: {reason}" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("preset", "values"),
    [
        ("auto", {"topk": 8, "nodes": 63, "shape": "auto"}),
        ("latency", {"topk": 8, "nodes": 63, "shape": "fixed"}),
        ("throughput", {"topk": 4, "nodes": 15, "shape": "auto"}),
    ],
)
def test_presets_differ_in_the_tree(config: Any, preset: str, values: dict[str, Any]) -> None:
    config.additional_config = {"graft": preset}
    decided = start(config)
    assert decided.preset == preset
    assert values.items() <= tree_of(config).items()
    table = config.speculative_config.num_speculative_tokens_per_batch_size
    assert (table is None) == (values["shape"] == "fixed")


@pytest.mark.parametrize(("candidates", "topk"), [(None, 8), (4, 4)])
def test_a_block_drafter_gets_no_more_children_than_it_has_candidates(
    config: Any, candidates: int | None, topk: int
) -> None:
    speculative = config.speculative_config
    speculative.method, speculative.parallel_drafting = "dflash", True
    speculative.num_speculative_tokens = 7
    own = {} if candidates is None else {"selector_top_k": candidates}
    draft = speculative.draft_model_config
    draft.hf_config = SimpleNamespace(block_size=8, dflash_config=own)
    name = "DFlashDraftModel" if candidates is None else "DFlash2DraftModel"
    draft.architectures = [name]
    decided = start(config)
    assert f"topk {topk}, steps 7" in decided.on["tree"]


def test_vision_graphs_are_on_where_there_is_a_tower(config: Any) -> None:
    config.model_config.multimodal_config = SimpleNamespace(language_model_only=False)
    decided = start(config)
    assert set(decided.on) == {"tree", "vit"}
    assert config.compilation_config.cudagraph_mm_encoder is True


@pytest.mark.parametrize(
    ("preset", "shape"), [("auto", "auto"), ("latency", "fixed"), ("throughput", "auto")]
)
def test_a_draft_model_grows_trees_as_they_were_measured(
    config: Any, preset: str, shape: str
) -> None:
    config.additional_config = {"graft": preset}
    config.speculative_config.method = "draft_model"
    assert set(start(config).on) == {"tree"}
    assert tree_of(config) == {"topk": 4, "steps": 7, "nodes": 15, "shape": shape}
    assert drafts(config) == 15


def chain_of_a_draft_model(config: Any) -> None:
    config.speculative_config.method = "draft_model"
    config.speculative_config.num_speculative_tokens_per_batch_size = [[1, 8, 7]]


def test_a_draft_model_without_trees_gets_graphs_of_its_chain(config: Any) -> None:
    chain_of_a_draft_model(config)
    decided = start(config)
    assert set(decided.on) == {"draft"}
    assert "counts drafts of a chain" in decided.off["tree"]
    assert drafts(config) == 7


def test_a_method_without_trees_leaves_stock_vllm(config: Any) -> None:
    config.speculative_config.method = "suffix"
    decided = start(config)
    assert decided.on == {}
    assert decided.off["tree"].endswith("'eagle', 'eagle3', 'mtp', 'ngram' or 'ngram_gpu'.")
    assert drafts(config) == 7


@pytest.mark.parametrize(("preset", "nodes"), [("auto", 63), ("latency", 63), ("throughput", 15)])
def test_without_a_draft_there_are_trees_of_n_grams(config: Any, preset: str, nodes: int) -> None:
    config.speculative_config = None
    config.additional_config = {"graft": preset}
    decided = start(config)
    assert tree_of(config) == {"topk": 4, "steps": 31, "nodes": nodes, "shape": "auto"}
    speculative = config.speculative_config
    assert (speculative.method, speculative.num_speculative_tokens) == ("ngram_gpu", nodes)
    assert (speculative.prompt_lookup_min, speculative.prompt_lookup_max) == (1, 16)
    assert speculative.target_model_config is config.model_config
    counts = [count for *_, count in speculative.num_speculative_tokens_per_batch_size]
    assert (max(counts), min(counts)) == (nodes, 0)
    assert decided.on["tree"].startswith(f"trees of up to {nodes} nodes of n-grams, and none")
    assert decided.off.keys() == {"hicache"}
    assert gave_drafts(config)


def test_n_grams_that_the_user_configures_keep_their_depth(config: Any) -> None:
    speculative = config.speculative_config
    speculative.method = "ngram_gpu"
    speculative.prompt_lookup_min, speculative.prompt_lookup_max = 5, 8
    decided = start(config)
    assert tree_of(config) == {"topk": 4, "steps": 7, "nodes": 28, "shape": "auto"}
    assert (speculative.prompt_lookup_min, drafts(config)) == (5, 28)
    assert "steps 7, shape auto, prompt_lookup_min 5, prompt_lookup_max 8" in decided.on["tree"]
    assert not gave_drafts(config)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model_config.runner_type", "pooling", "generates no text"),
        ("model_config.is_diffusion", True, "by diffusion"),
        ("model_config.is_encoder_decoder", True, "encoder"),
        ("use_v2_model_runner", False, "Model Runner V1"),
        ("scheduler_config.scheduler_cls", "mine.Own", "--scheduler-cls is 'mine.Own'"),
        ("scheduler_config.max_num_seqs", 1, "--max-num-seqs is 1"),
        ("model_config.max_model_len", 1 << 20, "more than 2% of the device's"),
        ("watermark_config", {}, "--watermark-config is given"),
    ],
)
def test_n_grams_that_are_ruled_out_leave_stock_vllm(
    config: Any, path: str, value: Any, words: str
) -> None:
    config.speculative_config = None
    change(config, {path: value})
    off = start(config).off["tree"]
    said = "There is no draft model, and `vllm-graft train` makes one: add --speculative-config"
    assert off.startswith(said)
    assert "Trees of n-grams, which need none, are off: " in off
    assert words in off
    assert config.speculative_config is None


def test_n_grams_on_recurrent_layers_stay_off(config: Any) -> None:
    _delta_rule(config)
    config.speculative_config = None
    assert "measured them on recurrent layers" in start(config).off["tree"]
    assert config.speculative_config is None


def test_n_grams_alone_fit_a_server_with_default_flags(config: Any) -> None:
    config.speculative_config = None
    changes = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    change(config, {f"scheduler_config.{name}": value for name, value in changes.items()})
    change(config, {"model_config.max_model_len": 131_072})
    assert "tree" in start(config).on


def test_n_grams_beside_adapters_fit_their_buffers(config: Any) -> None:
    config.speculative_config, config.lora_config = None, SimpleNamespace()
    change(config, {"scheduler_config.max_num_seqs": 64})
    start(config)
    assert tree_of(config)["nodes"] == 2048 // 64 - 1


def test_n_grams_that_are_taken_off_leave_what_stock_vllm_derives(config: Any) -> None:
    """VLLM plans its graphs for the rows of trees before the last refusals are known."""
    config.speculative_config = None
    activation.on_defaults(config)
    compilation, scheduler = config.compilation_config, config.scheduler_config
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [1, 64], 64
    scheduler.max_num_scheduled_tokens = 2048
    planned = []

    def plan() -> None:
        planned.append((config.speculative_config, compilation.cudagraph_capture_sizes))

    config._set_cudagraph_sizes = plan
    config.use_v2_model_runner = False
    activation.on_config(config)
    assert "Model Runner V1" in Decision.from_vllm(config).off["tree"]
    assert planned == [(None, None)]
    assert compilation.max_cudagraph_capture_size is None
    assert scheduler.max_num_scheduled_tokens is None
    assert config.speculative_config is None


def test_trees_of_a_refiner_are_left_to_who_names_them(config: Any) -> None:
    """Other drafts of its method were measured."""
    speculative = config.speculative_config
    speculative.method, speculative.parallel_drafting = "dflash", True
    speculative.draft_model_config.hf_config = SimpleNamespace()
    speculative.draft_model_config.architectures = ["DFlashQwen3XPressModel"]
    decided = start(config)
    assert decided.on == {}
    says = decided.off["tree"]
    assert says.startswith("The drafter for this draft is xpress. Nobody measured yet how fast")
    assert says.endswith("ask for --additional-config.graft.tree by name.")
    assert speculative.num_speculative_tokens == 7


def for_another(config: Any, **draft: Any) -> None:
    """Give a draft these values, and one of another vocabulary size without any."""
    size = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128_256}
    config.model_config.hf_text_config = SimpleNamespace(**size)
    own = SimpleNamespace(**{**size, **(draft or {"vocab_size": 151_936})})
    model = config.speculative_config.draft_model_config
    model.hf_config = model.hf_text_config = own


@pytest.mark.parametrize(
    "draft", [{"hidden_size": 5120}, {"eagle_aux_hidden_state_layer_ids": [99]}]
)
@pytest.mark.parametrize("preset", ["auto", "latency", "throughput"])
def test_a_draft_with_which_stock_would_stop_later_stops_a_preset(
    config: Any, preset: str, draft: dict[str, Any]
) -> None:
    config.additional_config = {"graft": preset}
    for_another(config, **draft)
    with pytest.raises(
        ConfigError, match="model is a draft for another target:\n  The dr"
    ) as caught:
        start(config)
    assert "vLLM stops at the first request, also without trees" in str(caught.value)
    # Where trees are off for another reason, vLLM stops all the same.
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="is a draft for another target:"):
        start(config)


@pytest.mark.parametrize("kind", ["vocabulary", "tokenizer"])
def test_a_draft_of_other_tokens_is_left_to_stock_with_a_warning(
    config: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path, kind: str
) -> None:
    begins = "The draft's vocab_size is 151936, but the target's is 128256. "
    if kind == "vocabulary":
        for_another(config)
    else:
        begins = "The tokenizer beside the draft is another than the target's: 3000 ids are "
        draft, target = config.speculative_config.draft_model_config, config.model_config
        draft.model, target.tokenizer = str(tmp_path), str(tmp_path / "target")
        for folder, mark in ((draft.model, "a"), (target.tokenizer, "b")):
            write_vocabulary(Path(folder), {f"{mark}{each}": each for each in range(3000)})
    with caplog.at_level(logging.WARNING, logger="vllm.graft"):
        says = start(config).off["tree"]
    assert says.startswith(begins)
    assert [record.getMessage() for record in caplog.records] == [says]
    assert tree_of(config) is None
    assert drafts(config) == 7


def test_the_host_cache_that_the_user_asks_for_stays_his(config: Any) -> None:
    config.kv_transfer_config = SimpleNamespace(kv_connector="HiCacheConnector")
    hicache = next(part for part in PARTS if part.name == "hicache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hicache, "section", lambda config, vllm_config: ())
        patch.setattr(hicache, "refuses", lambda asked, vllm_config: iter(["It can't."]))
        patch.setattr(hicache, "fill_in", lambda asked, vllm_config: None)
        activation.on_defaults(config)
        with pytest.raises(ConfigError, match="It can't"):
            activation.on_config(config)
    decided = Decision.from_vllm(config)
    assert "hicache" not in {**decided.on, **decided.off}
    assert "tree" in decided.on


LONG = "scheduler_config.long_prefill_token_threshold"
ROWS = "scheduler_config.max_num_batched_tokens"
DEPTH = "speculative_config.num_speculative_tokens"


@pytest.mark.parametrize(
    ("preset", "path", "value", "tree", "words"),
    [
        ("auto", ROWS, 1024, {"topk": 4}, "but: A level of the draft has 2048 rows"),
        ("auto", DEPTH, 1, {"nodes": 8}, ""),
        ("auto", "lora_config", object(), {"nodes": 7},
         "With --enable-lora a step has 8 rows for each request"),
        ("latency", LONG, 32, {"shape": "fixed", "nodes": 31},
         "but: --long-prefill-token-threshold is 32."),
        ("latency", LONG, 64, {"nodes": 63}, None),
        ("auto", LONG, 32, {"nodes": 63}, None),
        ("auto", "parallel_config.data_parallel_size", 2, {"shape": "auto"}, None),
        ("auto", "scheduler_config.scheduler_cls", "mine.Own", {"shape": "fixed", "nodes": 15},
         "shape is 'auto' and --scheduler-cls is 'mine.Own'. The"),
    ],
)  # fmt: skip
def test_a_tree_is_made_to_fit(
    config: Any, preset: str, path: str, value: Any, tree: dict[str, Any], words: str | None
) -> None:
    """A tree without `words` is as large as without the limit."""
    change(config, {"additional_config": {"graft": preset}, path: value})
    told = start(config).on["tree"]
    assert tree.items() <= tree_of(config).items()
    assert drafts(config) == tree_of(config)["nodes"]
    assert words in told if words is not None else "the preset wants" not in told.lower()
    assert path == DEPTH or value == functools.reduce(getattr, path.split("."), config)


@pytest.mark.parametrize(
    ("preset", "path", "value", "words"),
    [
        ("auto", ROWS, 511, "A level of the draft has 2048 rows"),
        ("latency", LONG, 1, "--long-prefill-token-threshold is 1, but a full tree has 2 rows. "),
        ("auto", DEPTH, 40, "is 40: set it to 1..32"),
    ],
)
def test_no_tree_fits(config: Any, preset: str, path: str, value: int, words: str) -> None:
    change(config, {"additional_config": {"graft": preset}, path: value})
    off = start(config).off["tree"]
    assert words in off if path == DEPTH else off.startswith(words)
    assert drafts(config) == (value if path == DEPTH else 7)


@pytest.mark.parametrize(
    ("current", "draft_dtype", "words"),
    [
        (platform("cpu"), "torch.bfloat16", "The platform cpu has no products of FP8 numbers."),
        (platform("cuda", (8, 6)), "torch.bfloat16", "this device has capability 8.6. FP8"),
        (platform(), "torch.float32", "The draft computes in float32."),
    ],
)
def test_the_head_is_in_fp8_only_where_that_is_faster(
    config: Any, on: Any, current: Any, draft_dtype: str, words: str
) -> None:
    on(current)
    config.speculative_config.draft_model_config.dtype = draft_dtype
    decided = start(config)
    assert tree_of(config)["head_dtype"] == "auto"
    assert words in decided.on["tree"]


@pytest.mark.parametrize(
    ("method", "draft_vocab", "target_vocab", "hot"),
    [
        ("eagle3", 32_000, 151_936, None),
        ("eagle3", None, 151_936, 49_152),
        ("eagle", None, 128_256, 49_152),
        ("eagle", None, 32_000, None),
        ("mtp", None, 248_320, 49_152),
        ("dflash", None, 151_936, None),
        ("ngram", None, 151_936, None),
    ],
)
def test_levels_with_a_large_head_draft_from_hot_tokens(
    config: Any, method: str, draft_vocab: int | None, target_vocab: int, hot: int | None
) -> None:
    from vllm_graft.spec_decode.presets.tree_preset import hot_size

    speculative = config.speculative_config
    speculative.method = method
    speculative.draft_model_config.hf_config = SimpleNamespace(draft_vocab_size=draft_vocab)
    speculative.draft_model_config.architectures = []
    config.model_config.get_vocab_size = lambda: target_vocab
    assert hot_size(config) == hot


def test_what_hot_tokens_are_on_is_told(config: Any) -> None:
    config.speculative_config.draft_model_config.hf_config = SimpleNamespace()
    config.model_config.get_vocab_size = lambda: 128_256
    decided = start(config)
    assert tree_of(config)["hot_tokens"] == 49_152
    assert decided.on["tree"].endswith("head_dtype fp8, hot_tokens 49152, ngram true")


def test_what_rules_n_grams_out_is_said_without_advice(config: Any) -> None:
    """A refusal of the shape names no flag that nobody gave."""
    config.speculative_config = None
    config.scheduler_config.scheduler_cls = "mine.Own"
    says = start(config).off["tree"]
    assert "--scheduler-cls is 'mine.Own'. The choice is made in vLLM's own scheduler" in says
    assert "set --additional-config" not in says


def test_n_grams_join_where_the_texts_take_little_memory(config: Any) -> None:
    # A hundredth of 80 GiB has room for 1,024 texts of 200,000 tokens, but not of 262,144.
    config.scheduler_config.max_num_seqs = 1024
    config.scheduler_config.max_num_batched_tokens = 8192
    config.model_config.max_model_len = 200_000
    larger = copy.deepcopy(config)
    start(config)
    assert tree_of(config)["ngram"] == {}
    larger.model_config.max_model_len = 262_144
    told = start(larger).on["tree"]
    assert "ngram" not in tree_of(larger)
    assert "would take 1.0 GiB with --max-num-seqs 1024 and --max-model-len 262144, more" in told


@pytest.mark.parametrize(
    ("method", "asked"), [("eagle", True), ("mtp", True), ("dflash", False), ("draft_model", True)]
)
def test_n_grams_join_drafts_that_grow_by_levels(config: Any, method: str, asked: bool) -> None:
    from vllm_graft.spec_decode.config.tree_config import NgramConfig
    from vllm_graft.spec_decode.presets.tree_preset import ngram_room

    config.speculative_config.method = method
    config.speculative_config.draft_model_config.architectures = []
    found = ngram_room(config)
    assert found == (NgramConfig() if asked else "")


@pytest.mark.parametrize("kind", ["kimi_linear", "nemotron_h"])
def test_some_recurrent_targets_get_no_tree_unasked(config: Any, kind: str) -> None:
    config.model_config.is_hybrid = True
    config.model_config.hf_text_config.model_type = kind
    decided = start(config)
    assert "graft.tree.recurrent is not given" in decided.off["tree"]
    assert "set" not in decided.off["tree"].split()


def _delta_rule(config: Any, method: str = "mtp") -> None:
    """Qwen3.5-9B's layers, a depth of 4, and the module that drafts."""
    model, speculative = config.model_config, config.speculative_config
    model.is_hybrid, model.dtype = True, torch.bfloat16
    model.hf_text_config = SimpleNamespace(
        model_type="qwen3_5_text",
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    config.cache_config = SimpleNamespace(
        cache_dtype="auto", mamba_cache_dtype="auto", mamba_ssm_cache_dtype="float32"
    )
    config.parallel_config.tensor_parallel_size = 1
    speculative.method, speculative.num_speculative_tokens = method, 4


@pytest.mark.parametrize("preset", ["auto", "throughput", "latency"])
@pytest.mark.parametrize(
    ("requests", "ranks", "states", "nodes"),
    [(16, 1, "float32", 15), (43, 1, "float32", 7), (32, 1, "float32", 7),
     (32, 2, "float32", 15), (32, 1, "bfloat16", 15)],
)  # fmt: skip
def test_the_gated_delta_rule_gets_small_trees(
    config: Any, preset: str, requests: int, ranks: int, states: str, nodes: int
) -> None:
    _delta_rule(config)
    config.additional_config = {"graft": preset}
    config.scheduler_config.max_num_seqs = requests
    config.parallel_config.tensor_parallel_size = ranks
    config.cache_config.mamba_ssm_cache_dtype = states
    decided = start(config)
    shape = "fixed" if preset == "latency" else "auto"
    assert tree_of(config) == {
        "topk": 4, "steps": 4, "nodes": nodes, "shape": shape, "head_dtype": "fp8",
    }  # fmt: skip
    assert config.speculative_config.num_speculative_tokens == nodes
    crowded = f"With 15 nodes and --max-num-seqs {requests} that is"
    assert (crowded in decided.on["tree"]) is (nodes == 7)
    # What `throughput` wants anyway needs no reason.
    is_smaller = (preset, nodes) != ("throughput", 15)
    assert ("of recurrent states per node and request" in decided.on["tree"]) is is_smaller


@pytest.mark.parametrize(
    ("device", "method", "words"),
    [
        ("xpu", "mtp", "whose trees need an NVIDIA GPU"),
        # Other drafts were not measured.
        ("cuda", "eagle3", "speculative_config.method is 'eagle3': set it to 'mtp'"),
    ],
)
def test_other_devices_and_drafts_of_the_gated_delta_rule_get_no_trees(
    config: Any, on: Any, device: str, method: str, words: str
) -> None:
    on(platform(device))
    _delta_rule(config, method)
    assert words in start(config).off["tree"]
    assert drafts(config) == 4


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("model_config.is_moe", True, "not always faster than chains where there are experts: ask"),
        ("speculative_config.draft_model_config.dtype", "torch.float32",
         "in FP8 alone: ask for --additional-config.graft.tree by name. The"),
        ("scheduler_config.max_num_seqs", 256,
         "With 7 nodes and --max-num-seqs 256 that is 109.5 GiB, more than a quarter of"),
    ],
)  # fmt: skip
def test_the_gated_delta_rule_is_left_to_vllm_where_trees_may_not_pay(
    config: Any, path: str, value: Any, says: str
) -> None:
    _delta_rule(config)
    change(config, {path: value})
    off = start(config).off["tree"]
    assert says in off
    assert "by name" in off
    assert drafts(config) == 4


def test_several_modules_on_the_gated_delta_rule_stay_refused(config: Any) -> None:
    _delta_rule(config)
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = 2
    assert "The draft has 2 MTP modules" in start(config).off["tree"]


SPOILED = pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.is_hybrid", True),
        ("parallel_config.pipeline_parallel_size", 2),
        ("speculative_config.enable_adaptive_verification", True),
    ],
)


@SPOILED
def test_a_refused_tree_leaves_stock_vllm_and_says_why(config: Any, path: str, value: Any) -> None:
    change(config, {path: value})
    reason = own_sentences("tree", config)
    decided = start(config)
    assert decided.on == {}
    assert decided.off["tree"] == reason != ""
    speculative = config.speculative_config
    assert speculative.num_speculative_tokens == 7
    assert speculative.num_speculative_tokens_per_batch_size is None
    assert config.additional_config["graft"].keys() == {"decided"}


@SPOILED
def test_a_named_tree_still_refuses(config: Any, path: str, value: Any) -> None:
    change(config, {path: value})
    config.additional_config = {"graft": {"tree": {"nodes": 63, "fallback": "refuse"}}}
    with pytest.raises(ConfigError, match=r"graft\.tree asks for tree drafts"):
        start(config)


def test_a_table_of_the_users_counts_drafts_of_a_chain(config: Any) -> None:
    table = [(1, 256, 3)]
    config.speculative_config.num_speculative_tokens_per_batch_size = table
    assert "counts drafts of a chain" in start(config).off["tree"]
    assert config.speculative_config.num_speculative_tokens_per_batch_size is table


def test_a_draft_with_mla_gets_trees(config: Any) -> None:
    change(config, MLA_DRAFT)
    assert "tree" in start(config).on


@pytest.mark.parametrize("found", ["unfit", "refused"])
def test_a_vllm_that_has_moved(config: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether that is known at once, or with the complete configuration, which proofs are for."""
    monkeypatch.setattr(automatic, found, lambda parts, *_: f"moved: {parts}")
    assert start(config).off["tree"] == "moved: ('core', 'tree')"
    assert drafts(config) == 7


MLA_DRAFT = {"speculative_config.draft_model_config.use_mla": True}
FP8 = {"cache_config.cache_dtype": "fp8"}
BACKEND = "speculative_config.attention_backend"
TEXT = "model_config.hf_text_config"


# fmt: off
LATE: list[tuple[Any, Changes, str]] = [
    (platform("cuda", (10, 0)), {}, "TRITON_ATTN, CPU_ATTN on compute capability 10.0. "),
    (platform("cuda", (8, 9)), FP8, "on compute capability 8.9 with K/V in fp8. "),
    (platform(), {"model_config.is_mm_prefix_lm": True},
     "for a model whose images are read in both directions. "),
    (platform("xpu"), {}, "on the platform xpu. The tree kernels"),
    (platform(), {BACKEND: SimpleNamespace(name="FLASHINFER")},
     "speculative_config.attention_backend is FLASHINFER, "),
    (platform("cpu"), FP8, "--kv-cache-dtype is fp8 on a CPU. "),
    (platform("cpu"), {f"{TEXT}.attn_logit_softcapping": 50.0},
     "The target caps its attention logits at 50.0. "),
    (platform(), {f"{TEXT}.head_dim": 192, f"{TEXT}.v_head_dim": 128},
     "heads of different sizes (192 and 128)"),
    (platform(), {**MLA_DRAFT, BACKEND: SimpleNamespace(name="TRITON_ATTN")},
     "none of TRITON_MLA, FLASH_ATTN_MLA, FLASHMLA, CPU_MLA. "),
]
# fmt: on


@pytest.mark.parametrize(("current", "changes", "words"), LATE)
def test_what_a_worker_would_refuse_later_is_left_off_now(
    config: Any, on: Any, current: Any, changes: Changes, words: str
) -> None:
    on(current)
    change(config, changes)
    assert words in start(config).off["tree"]
    assert drafts(config) == 7


def test_layers_with_heads_of_different_sizes_are_not_asked_for_one(config: Any) -> None:
    """Gemma 4's configuration raises then, and would stop the server."""

    class PerLayer(SimpleNamespace):
        @property
        def head_dim(self) -> int:
            raise RuntimeError("a per-layer attribute")

    config.model_config.hf_text_config = PerLayer()
    assert "tree" in start(config).on


def test_late_refusals_have_an_alternative(config: Any, on: Any) -> None:
    """Negative control: the same devices serve trees otherwise."""
    on(platform("cuda", (10, 0)))
    config.attention_config.backend = SimpleNamespace(name="FLASH_ATTN")
    assert "tree" in start(config).on


def test_an_installed_logits_processor(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("mine", "mine:Processor", "vllm.logits_processors")
    real = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **asked: [point] if asked == {"group": point.group} else real(**asked),
    )
    assert "A plugin brings the logits processor mine:Processor. " in start(config).off["tree"]


def test_graphs_are_taken_off_again(config: Any) -> None:
    chain_of_a_draft_model(config)
    config.compilation_config.cudagraph_mode = None  # Not chosen yet.
    activation.on_defaults(config)
    assert "draft" in Decision.from_vllm(config).on
    config.compilation_config.cudagraph_mode = SimpleNamespace(name="PIECEWISE")
    activation.on_config(config)
    decided = Decision.from_vllm(config)
    assert decided.on == {}
    assert "cudagraph_mode is PIECEWISE" in decided.off["draft"]
    assert config.additional_config["graft"].keys() == {"decided"}


def test_a_tree_that_is_taken_off_gives_the_numbers_back(config: Any) -> None:
    activation.on_defaults(config)
    assert drafts(config) == 63
    config.use_v2_model_runner = False
    looked = []
    config._maybe_disable_dynamic_sd_for_data_parallel = lambda: looked.append(tree_of(config))
    activation.on_config(config)
    assert "Model Runner V1" in Decision.from_vllm(config).off["tree"]
    # Ranks of vLLM's own drafts may not change their number, so it looks again, without trees.
    assert looked == [None]
    speculative = config.speculative_config
    assert speculative.num_speculative_tokens == 7
    assert speculative.num_speculative_tokens_per_batch_size is None


def test_another_part_that_is_taken_off_leaves_the_tree_its_numbers(config: Any) -> None:
    """Negative control."""
    config.model_config.multimodal_config = SimpleNamespace(language_model_only=False)
    activation.on_defaults(config)
    config.model_config.multimodal_config.language_model_only = True
    activation.on_config(config)
    assert set(Decision.from_vllm(config).on) == {"tree"}
    assert drafts(config) == 63


def test_a_derived_configuration_is_not_decided_again(config: Any) -> None:
    decided = start(config)
    given = config.additional_config
    derived = copy.copy(config)
    derived.model_config = config.speculative_config.draft_model_config
    assert start(derived) == decided
    assert derived.additional_config is given
    assert drafts(config) == 63


def test_what_crosses_to_other_processes_is_plain(config: Any) -> None:
    start(config)
    assert json.loads(json.dumps(config.additional_config)) == config.additional_config


def test_the_users_mapping_makes_another_engine(config: Any) -> None:
    given = {"other": 1, "graft": "auto"}
    config.additional_config = given
    start(config)
    assert given == {"other": 1, "graft": "auto"}
    assert config.additional_config["other"] == 1


@pytest.mark.parametrize("text", ["outo", "Auto", "", "eagle", "on"])
def test_a_misspelt_preset_is_refused_with_all_names(config: Any, text: str) -> None:
    config.additional_config = {"graft": text}
    for hook in (activation.on_defaults, activation.on_config):
        with pytest.raises(ConfigError) as caught:
            hook(config)
        message = str(caught.value)
        assert message.startswith(f"--additional-config.graft: {text!r} is no preset.")
        assert message.endswith("or a mapping with the keys tree, vit, draft, learn.")
        assert message.count("throughput") == 1
    assert drafts(config) == 7


@pytest.mark.parametrize(
    ("interpreted", "words"),
    [("1", "(its log says why)"), ("0", "the environment lacks VLLM_GRAFT_INTERPRET=1")],
)
def test_a_cpu_without_triton_is_told_of_the_interpreter(
    config: Any, on: Any, monkeypatch: pytest.MonkeyPatch, interpreted: str, words: str
) -> None:
    monkeypatch.setenv("VLLM_GRAFT_INTERPRET", interpreted)
    on(platform("cpu"))
    change(config, {"use_v2_model_runner": False})
    assert words in start(config).off["tree"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("presett", "graft.presett: unknown key. Did you mean 'preset'?"),
        ("memory", "Did you mean {0}.tree.memory or {0}.vit.memory?"),
        ("topk", "Did you mean {0}.tree.topk?"),
        ("follow", "Did you mean {0}.learn.follow?"),
        ("three", "graft.three: unknown key. Did you mean 'tree'?"),
    ],
)
def test_a_key_in_a_wrong_place_is_told_the_right_one(key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GraftConfig.parse({key: "1"})
    assert words.format("--additional-config.graft") in str(caught.value)


@pytest.mark.parametrize("records", [True, False])
def test_a_preset_stands_beside_records(config: Any, tmp_path: Path, records: bool) -> None:
    alone = copy.deepcopy(config)
    learn = {"learn": {"record": str(tmp_path / "traffic")}} if records else {}
    config.additional_config = {"graft": {"preset": "auto", **learn}}
    assert start(config).on == start(alone).on
    found = config.additional_config["graft"]
    assert found == {**alone.additional_config["graft"], **learn}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (
            {"preset": "auto", "tree": {}},
            r"graft\.preset auto decides on --additional-config\.graft\.tree: drop that, or drop",
        ),
        ({"preset": "auto", "tree": {"memory": True, "topk": 4}}, r"graft\.tree\.topk: drop that"),
        ({"preset": "auto", "tree": {"memory": 7}}, r"graft\.tree\.memory"),
        ({"preset": "auto", "tree": True}, r"graft\.preset auto decides on"),
        ({"preset": "auto", "vit": {}}, r"graft\.learn and \S+graft\.tree\.memory may stand\."),
        ({"preset": "fast", "learn": {}}, r"graft\.preset: 'fast' is no preset\."),
        ({"preset": True}, r"graft\.preset: True is no preset\."),
        # A preset below the mapping is told where it stands.
        ({"auto": True}, r"write --additional-config\.graft auto\."),
        ({"latency": {}}, r"write --additional-config\.graft latency\."),
    ],
)
def test_a_preset_decides_on_all_other_parts(
    config: Any, section: dict[str, Any], words: str
) -> None:
    config.additional_config = {"graft": section}
    with pytest.raises(ConfigError, match=words):
        start(config)


MEMORY = "--additional-config.graft.tree.memory"


@pytest.mark.parametrize("memory", [True, "true", {"bytes": "128MiB"}])
@pytest.mark.parametrize("drafted", [True, False])
def test_a_memory_may_stand_beside_a_preset(config: Any, drafted: bool, memory: object) -> None:
    """Only the user knows whether requests may learn of each other."""
    if not drafted:
        config.speculative_config = None
    alone = copy.deepcopy(config)
    config.additional_config = {"graft": {"preset": "auto", "tree": {"memory": memory}}}
    decided = start(config)
    assert decided.on["tree"] == f"memory as given, {start(alone).on['tree']}"
    found, without = tree_of(config), tree_of(alone)
    size = 128 << 20 if isinstance(memory, dict) else 64 << 20
    assert MemoryConfig.model_validate(found.pop("memory")).bytes == size
    assert found == without
    assert decided.asked == ["tree"]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("speculative_config.method", "suffix", "is 'suffix', and a preset has trees for"),
        ("speculative_config.method", "draft_model", "graft.tree.ngram is not"),
        ("model_config.max_model_len", 1 << 23, "graft.tree.ngram is not"),
    ],
)
def test_a_memory_that_a_preset_has_no_trees_for_is_refused(
    config: Any, path: str, value: object, words: str
) -> None:
    change(config, {path: value})
    config.additional_config = {"graft": {"preset": "auto", "tree": {"memory": True}}}
    with pytest.raises(ConfigError, match=rf"{MEMORY} is given beside") as caught:
        activation.on_defaults(config)
    assert words in str(caught.value)
    instead = f"Change that, drop {MEMORY}, or drop the preset and name all parts."
    assert str(caught.value).endswith(instead)


@pytest.mark.parametrize("memory", [False, "false", None, {"scope": "request"}])
@pytest.mark.parametrize(
    "changes", [{}, {"speculative_config.method": "suffix"}, {"use_v2_model_runner": False}]
)
def test_no_memory_beside_a_preset_asks_for_nothing(
    config: Any, memory: object, changes: Changes
) -> None:
    """A preset never stops a server for what nobody asked for."""
    change(config, changes)
    alone = copy.deepcopy(config)
    config.additional_config = {"graft": {"preset": "auto", "tree": {"memory": memory}}}
    decided = start(config)
    assert decided == start(alone)
    assert config.additional_config == alone.additional_config
    assert ("tree" in decided.on) == (not changes)


def test_a_memory_that_is_ruled_out_late_is_refused(config: Any) -> None:
    config.additional_config = {"graft": {"preset": "auto", "tree": {"memory": True}}}
    activation.on_defaults(config)
    config.use_v2_model_runner = False
    with pytest.raises(ConfigError, match=rf"{MEMORY} is given beside.*Model Runner V1"):
        activation.on_config(config)


@pytest.mark.parametrize("tree", [{}, {"tree": {"memory": True}}])
def test_a_worker_does_not_leave_out_what_was_given_beside_a_preset(
    config: Any, tree: dict[str, Any]
) -> None:
    config.additional_config = {"graft": {"preset": "auto", **tree}}
    start(config)
    late = NotActiveError("no trees here")
    with pytest.raises(NotActiveError) if tree else contextlib.nullcontext():
        decline_or_raise("tree", late, config)


def test_a_preset_below_a_misspelt_key_is_refused(config: Any) -> None:
    config.additional_config = {"graff": "auto"}
    with pytest.raises(ConfigError, match=r"Write --additional-config\.graft\."):
        activation.on_defaults(config)
    # Another plugin's, for all that we know.
    config.additional_config = {"graff": "on", "other": "auto"}
    activation.on_defaults(config)


def test_a_preset_that_nobody_decided_is_not_passed_over(config: Any) -> None:
    with pytest.raises(ConfigError, match="did not ask this platform for its defaults"):
        activation.on_config(config)


def test_graft_info_tells_the_decisions_and_what_the_worker_found(config: Any) -> None:
    config.model_config.multimodal_config = SimpleNamespace(language_model_only=False)
    decided = start(config)
    said = told(config)
    assert said == {"name": "auto", "on": decided.on, "off": decided.off}
    assert set(decided.on) == {"tree", "vit"}
    info.decline("vit", "its tower is odd")
    said = told(config)
    assert said is not None
    assert set(said["on"]) == {"tree"}
    assert said["off"]["vit"] == "its tower is odd"
    info.clear()


def test_without_a_preset_graft_info_tells_none(config: Any) -> None:
    config.additional_config = {"graft": {"tree": {"nodes": 63}}}
    start(config)
    assert told(config) is None
