"""``graft: auto``: what is decided for which configuration; vLLM's platform is a fake here."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

# Some tests replace the module `vllm`, behind which a preset asks this one for a state's bytes.
import vllm.model_executor.layers.mamba.mamba_utils  # noqa: F401

from vllm_graft import activation, automatic
from vllm_graft.base import info, log
from vllm_graft.base.decision import decision_of, told
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.refusal import facts
from vllm_graft.config import GraftConfig
from vllm_graft.parts import PARTS


def platform(device_type: str = "cuda", capability: tuple[int, int] = (9, 0)) -> Any:
    """A stand-in for vLLM's, which asks NVML."""
    major, minor = capability
    found = SimpleNamespace(major=major, minor=minor, as_version_str=lambda: f"{major}.{minor}")
    return SimpleNamespace(
        device_type=device_type,
        is_cuda=lambda: device_type == "cuda",
        get_device_capability=lambda: found if device_type == "cuda" else None,
        get_device_total_memory=lambda: 80 << 30,
        support_static_graph_mode=lambda: device_type == "cuda",
    )


@pytest.fixture
def on(
    fake_module: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Any], None]:
    """Run on another platform; the fixture itself is Hopper with a vLLM that fits."""

    def choose(current: Any) -> None:
        envs = fake_module("vllm.envs", VLLM_BATCH_INVARIANT=False)
        fake_module("vllm", envs=envs)
        fake_module("vllm.platforms", current_platform=current)

    monkeypatch.setattr(automatic, "moved", lambda *parts: "")
    log.info_once.cache_clear()
    log.warning_once.cache_clear()
    info.clear()
    choose(platform())
    return choose


@pytest.fixture
def config(vllm_config: Any, on: Any) -> Any:
    """An EAGLE-3 chain of 7 tokens, and ``--additional-config.graft auto``."""
    vllm_config.additional_config = {"graft": "auto"}
    vllm_config.model_config.enforce_eager = False
    vllm_config.model_config.max_model_len = 8192
    vllm_config.model_config.multimodal_config = None
    vllm_config.model_config.is_mm_prefix_lm = False
    vllm_config.parallel_config.data_parallel_size = 1
    vllm_config.scheduler_config.scheduler_cls = None
    vllm_config.compilation_config.cudagraph_mm_encoder = False
    vllm_config.cache_config = SimpleNamespace(cache_dtype="auto")
    vllm_config.lora_config = None
    speculative = vllm_config.speculative_config
    speculative.num_speculative_tokens = 7
    speculative.num_speculative_tokens_per_batch_size = None
    speculative.enforce_eager = None
    speculative.attention_backend = None
    speculative.draft_model_config = SimpleNamespace(
        **{**vars(vllm_config.model_config), "hf_text_config": SimpleNamespace()},
        hf_config=SimpleNamespace(draft_vocab_size=32_000),
        dtype="torch.bfloat16",
    )
    return vllm_config


def start(config: Any) -> Any:
    """Call both hooks as vLLM does; return the decisions."""
    activation.on_defaults(config)
    activation.on_config(config)
    return decision_of(config)


def tree_of(config: Any) -> Any:
    return config.additional_config["graft"].get("tree")


def own_sentences(name: str, config: Any) -> str:
    """What the part says to somebody who names it."""
    part = next(part for part in PARTS if part.name == name)
    named = copy.copy(config)
    named.additional_config = {"graft": {name: {}}}
    return facts(part.refuses(part.section(GraftConfig.from_vllm(named), named), named))


# --- what is on -------------------------------------------------------------------------------


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
    config.speculative_config = None
    decided = start(config)
    assert set(decided.on) == {"vit"}
    assert config.compilation_config.cudagraph_mm_encoder is True
    assert decided.off["tree"].startswith("There is no draft model: add --speculative-config ")


def test_a_draft_model_gets_graphs_of_its_chain(config: Any) -> None:
    config.speculative_config.method = "draft_model"
    decided = start(config)
    assert set(decided.on) == {"draft"}
    assert (
        "'draft_model', and a preset has trees for 'dflash', 'dspark', 'eagle'"
        in decided.off["tree"]
    )
    assert (
        "measured yet how fast its trees are: ask for --additional-config.graft.tree"
        in decided.off["tree"]
    )
    assert config.speculative_config.num_speculative_tokens == 7


def test_a_method_without_trees_leaves_stock_vllm(config: Any) -> None:
    config.speculative_config.method = "suffix"
    decided = start(config)
    assert decided.on == {}
    assert decided.off["tree"].endswith("'dspark', 'eagle', 'eagle3' or 'mtp'.")


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_trees_whose_speed_is_unknown_are_left_to_who_names_them(config: Any, method: str) -> None:
    config.speculative_config.method = method
    decided = start(config)
    assert decided.on == {}
    says = decided.off["tree"]
    beginning = f"speculative_config.method is '{method}', and a preset has trees for 'dflash', "
    assert says.startswith(beginning)
    assert (
        "measured yet how fast its trees are: ask for --additional-config.graft.tree by name"
        in says
    )
    assert config.speculative_config.num_speculative_tokens == 7


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
    decided = decision_of(config)
    assert "hicache" not in {**decided.on, **decided.off}
    assert "tree" in decided.on


# --- what is made to fit ----------------------------------------------------------------------


def test_a_tree_is_made_narrower_where_its_levels_would_not_fit(config: Any) -> None:
    config.scheduler_config.max_num_batched_tokens = 1024
    decided = start(config)
    assert tree_of(config)["topk"] == 4
    assert "but: A level of the draft has 2048 rows" in decided.on["tree"]
    assert config.scheduler_config.max_num_batched_tokens == 1024


def test_no_tree_of_one_branch(config: Any) -> None:
    config.scheduler_config.max_num_batched_tokens = 511
    assert start(config).off["tree"].startswith("A level of the draft has 2048 rows")
    assert config.speculative_config.num_speculative_tokens == 7


def test_a_shallow_tree_has_the_nodes_that_it_holds(config: Any) -> None:
    config.speculative_config.num_speculative_tokens = 1
    start(config)
    assert tree_of(config)["nodes"] == config.speculative_config.num_speculative_tokens == 8


def test_with_lora_a_tree_has_the_rows_that_fit(config: Any) -> None:
    config.lora_config = object()
    assert "With --enable-lora a step has 8 rows for each request" in start(config).on["tree"]
    assert tree_of(config)["nodes"] == 7


def test_a_fixed_tree_has_the_rows_that_the_threshold_leaves_whole(config: Any) -> None:
    config.additional_config = {"graft": "latency"}
    config.scheduler_config.long_prefill_token_threshold = 32
    decided = start(config)
    assert {"shape": "fixed", "nodes": 31}.items() <= tree_of(config).items()
    assert "but: --long-prefill-token-threshold is 32." in decided.on["tree"]


@pytest.mark.parametrize(("preset", "threshold"), [("latency", 64), ("auto", 32)])
def test_other_trees_are_as_large_as_without_a_threshold(
    config: Any, preset: str, threshold: int
) -> None:
    config.additional_config = {"graft": preset}
    config.scheduler_config.long_prefill_token_threshold = threshold
    assert "the preset wants" not in start(config).on["tree"].lower()
    assert tree_of(config)["nodes"] == 63


def test_no_tree_where_the_threshold_leaves_no_row_for_a_node(config: Any) -> None:
    config.additional_config = {"graft": "latency"}
    config.scheduler_config.long_prefill_token_threshold = 1
    off = start(config).off["tree"]
    assert off.startswith("--long-prefill-token-threshold is 1, but a full tree has 2 rows. ")
    assert config.speculative_config.num_speculative_tokens == 7


def test_replicas_get_a_small_fixed_tree(config: Any) -> None:
    config.parallel_config.data_parallel_size = 2
    decided = start(config)
    assert {"shape": "fixed", "nodes": 15}.items() <= tree_of(config).items()
    assert "shape is 'auto' and --data-parallel-size is 2. vLLM" in decided.on["tree"]


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
    assert "would take 1.1 GB with --max-num-seqs 1024 and --max-model-len 262144, more" in told


@pytest.mark.parametrize(
    ("method", "asked"), [("eagle", True), ("mtp", True), ("dflash", False), ("draft_model", True)]
)
def test_n_grams_join_drafts_that_grow_by_levels(config: Any, method: str, asked: bool) -> None:
    from vllm_graft.spec_decode.presets.ngram_room import ngram_room

    config.speculative_config.method = method
    config.speculative_config.draft_model_config.architectures = []
    found = ngram_room(config)
    assert (found.ngram is not None, found.says) == (asked, "")


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


def test_nothing_is_filled_in_for_recurrent_layers_on_other_devices(config: Any, on: Any) -> None:
    on(platform("xpu"))
    _delta_rule(config)
    assert "whose trees need an NVIDIA GPU" in start(config).off["tree"]
    assert config.speculative_config.num_speculative_tokens == 4


def test_other_drafts_of_the_gated_delta_rule_were_not_measured(config: Any) -> None:
    _delta_rule(config, "eagle3")
    decided = start(config)
    assert "speculative_config.method is 'eagle3': set it to 'mtp'" in decided.off["tree"]
    assert config.speculative_config.num_speculative_tokens == 4


def _with_experts(config: Any) -> None:
    config.model_config.is_moe = True


def _without_an_fp8_head(config: Any) -> None:
    config.speculative_config.draft_model_config.dtype = "torch.float32"


def _crowded(config: Any) -> None:
    config.scheduler_config.max_num_seqs = 256


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_with_experts, "not always faster than chains where there are experts: ask for"),
        (_without_an_fp8_head, "in FP8 alone: ask for --additional-config.graft.tree by name. The"),
        (_crowded, "With 7 nodes and --max-num-seqs 256 that is 118 GB, more than a quarter of"),
    ],
)
def test_the_gated_delta_rule_is_left_to_vllm_where_trees_may_not_pay(
    config: Any, change: Callable[[Any], None], says: str
) -> None:
    _delta_rule(config)
    change(config)
    decided = start(config)
    assert says in decided.off["tree"]
    assert "by name" in decided.off["tree"]
    assert config.speculative_config.num_speculative_tokens == 4


def test_several_modules_on_the_gated_delta_rule_stay_refused(config: Any) -> None:
    _delta_rule(config)
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = 2
    assert "The draft has 2 MTP modules" in start(config).off["tree"]


# --- what is refused stays stock --------------------------------------------------------------


def _hybrid(config: Any) -> None:
    config.model_config.is_hybrid = True


def _pipeline(config: Any) -> None:
    config.parallel_config.pipeline_parallel_size = 2


def _adaptive(config: Any) -> None:
    config.speculative_config.enable_adaptive_verification = True


@pytest.mark.parametrize("spoil", [_hybrid, _pipeline, _adaptive])
def test_a_refused_tree_leaves_stock_vllm_and_says_why(
    config: Any, spoil: Callable[[Any], None]
) -> None:
    spoil(config)
    reason = own_sentences("tree", config)
    decided = start(config)
    assert decided.on == {}
    assert decided.off["tree"] == reason != ""
    speculative = config.speculative_config
    assert speculative.num_speculative_tokens == 7
    assert speculative.num_speculative_tokens_per_batch_size is None
    assert config.additional_config["graft"].keys() == {"decided"}


@pytest.mark.parametrize("spoil", [_hybrid, _pipeline, _adaptive])
def test_a_named_tree_still_refuses(config: Any, spoil: Callable[[Any], None]) -> None:
    """Negative control."""
    spoil(config)
    config.additional_config = {"graft": {"tree": {"nodes": 63, "fallback": "refuse"}}}
    with pytest.raises(ConfigError, match=r"graft\.tree asks for tree drafts"):
        start(config)


def test_a_table_of_the_users_counts_drafts_of_a_chain(config: Any) -> None:
    table = [(1, 256, 3)]
    config.speculative_config.num_speculative_tokens_per_batch_size = table
    assert "counts drafts of a chain" in start(config).off["tree"]
    assert config.speculative_config.num_speculative_tokens_per_batch_size is table


def test_a_depth_that_no_tree_has(config: Any) -> None:
    config.speculative_config.num_speculative_tokens = 40
    assert "got 40: set it to 1..32" in start(config).off["tree"]


def test_a_draft_with_mla_gets_trees(config: Any, on: Any) -> None:
    on(platform())
    _mla_draft(config)
    assert "tree" in start(config).on


def test_a_vllm_that_has_moved(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "moved", lambda *parts: f"moved: {parts}")
    assert start(config).off["tree"] == "moved: ('core', 'tree')"
    assert config.speculative_config.num_speculative_tokens == 7


def _fp8_cache(config: Any) -> None:
    config.cache_config.cache_dtype = "fp8"


def _uneven_heads(config: Any) -> None:
    vars(config.model_config.hf_text_config).update(head_dim=192, v_head_dim=128)


def _mla_draft(config: Any) -> None:
    config.speculative_config.draft_model_config.use_mla = True


def _mla_draft_backend(config: Any) -> None:
    _mla_draft(config)
    config.speculative_config.attention_backend = SimpleNamespace(name="TRITON_ATTN")


def _soft_cap(config: Any) -> None:
    config.model_config.hf_text_config.attn_logit_softcapping = 50.0


def _draft_backend(config: Any) -> None:
    config.speculative_config.attention_backend = SimpleNamespace(name="FLASHINFER")


def _prefix(config: Any) -> None:
    config.model_config.is_mm_prefix_lm = True


def _nothing(config: Any) -> None:
    pass


LATE = [
    (platform("cuda", (10, 0)), _nothing, "TRITON_ATTN, CPU_ATTN on compute capability 10.0. "),
    (platform("cuda", (8, 9)), _fp8_cache, "on compute capability 8.9 with K/V in fp8. "),
    (platform(), _prefix, "for a model whose images are read in both directions. "),
    (platform("xpu"), _nothing, "on the platform xpu. The tree kernels"),
    (platform(), _draft_backend, "speculative_config.attention_backend is FLASHINFER, "),
    (platform("cpu"), _fp8_cache, "--kv-cache-dtype is fp8 on a CPU. "),
    (platform("cpu"), _soft_cap, "The target caps its attention logits at 50.0. "),
    (platform(), _uneven_heads, "heads of different sizes (192 and 128)"),
    (platform(), _mla_draft_backend, "none of TRITON_MLA, FLASH_ATTN_MLA, FLASHMLA, CPU_MLA. "),
]


@pytest.mark.parametrize(("current", "spoil", "words"), LATE)
def test_what_a_worker_would_refuse_later_is_left_off_now(
    config: Any, on: Any, current: Any, spoil: Callable[[Any], None], words: str
) -> None:
    on(current)
    spoil(config)
    assert words in start(config).off["tree"]
    assert config.speculative_config.num_speculative_tokens == 7


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


# --- what only the complete configuration tells -----------------------------------------------


def test_graphs_are_taken_off_again(config: Any) -> None:
    config.speculative_config.method = "draft_model"
    config.compilation_config.cudagraph_mode = None  # Not chosen yet.
    activation.on_defaults(config)
    assert "draft" in decision_of(config).on
    config.compilation_config.cudagraph_mode = SimpleNamespace(name="PIECEWISE")
    activation.on_config(config)
    decided = decision_of(config)
    assert decided.on == {}
    assert "cudagraph_mode is PIECEWISE" in decided.off["draft"]
    assert config.additional_config["graft"].keys() == {"decided"}


def test_a_tree_that_is_taken_off_gives_the_numbers_back(config: Any) -> None:
    activation.on_defaults(config)
    assert config.speculative_config.num_speculative_tokens == 63
    config.use_v2_model_runner = False
    activation.on_config(config)
    assert "Model Runner V1" in decision_of(config).off["tree"]
    speculative = config.speculative_config
    assert speculative.num_speculative_tokens == 7
    assert speculative.num_speculative_tokens_per_batch_size is None


def test_another_part_that_is_taken_off_leaves_the_tree_its_numbers(config: Any) -> None:
    """Negative control."""
    config.model_config.multimodal_config = SimpleNamespace(language_model_only=False)
    activation.on_defaults(config)
    config.model_config.multimodal_config.language_model_only = True
    activation.on_config(config)
    assert set(decision_of(config).on) == {"tree"}
    assert config.speculative_config.num_speculative_tokens == 63


def test_a_derived_configuration_is_not_decided_again(config: Any) -> None:
    decided = start(config)
    given = config.additional_config
    derived = copy.copy(config)
    derived.model_config = config.speculative_config.draft_model_config
    assert start(derived) == decided
    assert derived.additional_config is given
    assert config.speculative_config.num_speculative_tokens == 63


def test_what_crosses_to_other_processes_is_plain(config: Any) -> None:
    start(config)
    assert json.loads(json.dumps(config.additional_config)) == config.additional_config


def test_the_users_mapping_makes_another_engine(config: Any) -> None:
    given = {"other": 1, "graft": "auto"}
    config.additional_config = given
    start(config)
    assert given == {"other": 1, "graft": "auto"}
    assert config.additional_config["other"] == 1


# --- what is no preset ------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["outo", "Auto", "", "eagle", "on"])
def test_a_misspelt_preset_is_refused_with_all_names(config: Any, text: str) -> None:
    config.additional_config = {"graft": text}
    for hook in (activation.on_defaults, activation.on_config):
        with pytest.raises(ConfigError) as caught:
            hook(config)
        message = str(caught.value)
        assert message.startswith(f"--additional-config.graft: {text!r} is no preset.")
        assert "Allowed: auto, latency, throughput, or a mapping with the keys tree" in message
    assert config.speculative_config.num_speculative_tokens == 7


@pytest.mark.parametrize(
    ("section", "preset"),
    [({"preset": "auto"}, "auto"), ({"auto": True}, "auto"), ({"latency": {}}, "latency")],
)
def test_a_preset_below_the_mapping_is_told_where_it_stands(
    config: Any, section: dict[str, Any], preset: str
) -> None:
    config.additional_config = {"graft": section}
    with pytest.raises(ConfigError, match=rf"write --additional-config\.graft {preset}\."):
        activation.on_config(config)


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


# --- graft_info -------------------------------------------------------------------------------


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
