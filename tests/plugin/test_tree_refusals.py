"""Each combination that a tree cannot serve is refused, with advice on what to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.refusals import validate
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.markers import hookimpl
from vllm_graft.config import GraftConfig
from vllm_graft.hooks import manager
from vllm_graft.hooks.entries import Drafter
from vllm_graft.spec_decode.targets.recurrent import recurrent_features


def _set(config: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    assert hasattr(config, name) or "hf_text_config" in path, f"{path} is not in the stand-in"
    setattr(config, name, value)


def _refusal(config: Any, **eagle: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(GraftConfig.parse({"tree": eagle}), config)
    return str(caught.value)


def _tells(message: str, words: str | tuple[str, ...]) -> bool:
    return all(each in message for each in ([words] if isinstance(words, str) else words))


CASES: list[tuple[str, Any, str | tuple[str, ...]]] = [
    ("speculative_config", None, "add --speculative-config"),
    (
        "speculative_config.method",
        "suffix",
        (
            "speculative_config.method is 'suffix'. ",
            "set speculative_config.method to 'dflash', 'draft_model', 'dspark',",
        ),
    ),
    (
        "speculative_config.num_speculative_tokens",
        64,
        ("is 64. ", "num_speculative_tokens to 1..63"),
    ),
    ("speculative_config.num_speculative_tokens", 0, ("is 0. ", "num_speculative_tokens to 1..63")),
    ("speculative_config.draft_sample_method", "probabilistic", "draft_sample_method"),
    ("speculative_config.rejection_sample_method", "block", ("method is 'block'", "to 'standard'")),
    ("speculative_config.rejection_sample_method", "synthetic", "_method to 'standard'"),
    ("speculative_config.use_local_argmax_reduction", True, "use_local_argmax_reduction"),
    ("speculative_config.parallel_drafting", True, "parallel_drafting"),
    ("speculative_config.enable_adaptive_verification", True, "enable_adaptive_verification"),
    ("use_v2_model_runner", False, "unset VLLM_USE_V2_MODEL_RUNNER"),
    (
        "compilation_config.cudagraph_mode",
        SimpleNamespace(name="FULL"),
        ("cudagraph_mode is FULL. ", "FULL_DECODE_ONLY, PIECEWISE or NONE"),
    ),
    (
        "parallel_config.pipeline_parallel_size",
        2,
        ("-size is 2. ", "set --pipeline-parallel-size to 1"),
    ),
    ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size is 2"),
    ("parallel_config.prefill_context_parallel_size", 4, "--prefill-context-parallel-size is 4"),
    ("parallel_config.use_ubatching", True, "drop --enable-dbo and --ubatch-size"),
    ("parallel_config.enable_batch_sharded_sampling", True, "--enable-batch-sharded-sampling"),
    ("model_config.is_hybrid", True, "Mamba"),
    ("model_config.is_attention_free", True, "Mamba"),
    ("model_config.hf_text_config.index_topk", 2048, "uses sparse attention. An indexer picks"),
    (
        "speculative_config.draft_model_config.hf_text_config",
        SimpleNamespace(index_topk=2048),
        "The draft uses sparse attention. An indexer",
    ),
    ("model_config.is_encoder_decoder", True, "encoder-decoder"),
    ("model_config.uses_alibi", True, "ALiBi"),
    ("model_config.return_sampling_mask", True, "--return-sampling-mask"),
    ("model_config.enable_trace_replay", True, "--enable-trace-replay"),
    ("model_config.logits_processors", ["mine:Processor"], "--logits-processors"),
    ("scheduler_config.max_num_seqs", 257, "has 2056 rows (--max-num-seqs 257 times"),
    ("scheduler_config.max_num_batched_tokens", 2047, "set --max-num-seqs to 255 or less"),
    ("watermark_config", object(), "--watermark-config"),
    ("kv_transfer_config", SimpleNamespace(kv_connector="Other"), "--kv-transfer-config"),
]


@pytest.mark.parametrize(("path", "value", "words"), CASES)
def test_refused(vllm_config: Any, path: str, value: Any, words: str | tuple[str, ...]) -> None:
    _set(vllm_config, path, value)
    message = _refusal(vllm_config)
    assert _tells(message, words)
    assert message.startswith("--additional-config.graft.tree asks for tree drafts")
    assert len(message.splitlines()) == 2


def test_the_stand_in_itself_is_served(vllm_config: Any) -> None:
    validate(GraftConfig.parse({"tree": {}}), vllm_config)


@pytest.mark.parametrize(("path", "value", "words"), CASES)
def test_nothing_is_refused_without_eagle(
    vllm_config: Any, path: str, value: Any, words: str | tuple[str, ...]
) -> None:
    _set(vllm_config, path, value)
    validate(GraftConfig(), vllm_config)


def test_every_problem_is_named_at_once(vllm_config: Any) -> None:
    vllm_config.parallel_config.pipeline_parallel_size = 2
    vllm_config.model_config.is_hybrid = True
    assert len(_refusal(vllm_config).splitlines()) == 3


@pytest.mark.parametrize(
    ("kind", "path", "value", "words"),
    [
        ("qwen3_next", "cache_config", SimpleNamespace(use_replayssm=True), "no state per node"),
        ("nemotron_h", "cache_config", SimpleNamespace(use_replayssm=True), "no state per node"),
        ("nemotron_h", "", None, ""),
        ("qwen3_next", "", None, ""),
        ("kimi_linear", "cache_config", SimpleNamespace(use_replayssm=True), "no state per node"),
        ("kimi_linear", "", None, ""),
    ],
)
def test_recurrent_layers_need_a_state_per_node(
    vllm_config: Any,
    kind: str,
    path: str,
    value: Any,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurrent_features, "_on_nvidia", lambda: True)
    vllm_config.model_config.is_hybrid = True
    vllm_config.model_config.hf_text_config.model_type = kind
    if not words:
        validate(GraftConfig.parse({"tree": {"recurrent": True}}), vllm_config)
        if kind == "qwen3_next":
            validate(GraftConfig.parse({"tree": {}}), vllm_config)
        else:
            assert "graft.tree.recurrent is not given" in _refusal(vllm_config)
        message = _refusal(vllm_config, recurrent=False)
        assert "graft.tree.recurrent is false" in message
        assert "graft.tree.recurrent to true" in message
        return
    setattr(vllm_config, path, value)
    message = _refusal(vllm_config, recurrent=True)
    assert words in message
    assert "--additional-config.graft.tree.topk to 1" in message


@pytest.mark.parametrize(
    ("kind", "more", "refused"),
    [
        ("qwen3_next", {}, False),
        ("qwen3_next", {"topk": 1, "steps": 32}, True),
        ("kimi_linear", {}, False),
        ("kimi_linear", {"topk": 1, "steps": 32}, True),
        ("nemotron_h", {}, False),
        ("llama", {}, True),
    ],
)
def test_inputs_are_kept_by_some_recurrent_layers_alone(
    vllm_config: Any,
    kind: str,
    more: dict[str, Any],
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurrent_features, "_on_nvidia", lambda: True)
    vllm_config.model_config.is_hybrid = kind != "llama"
    vllm_config.model_config.hf_text_config.model_type = kind
    given = {"recurrent": True, "recurrent_form": "inputs", **more}
    if refused:
        message = _refusal(vllm_config, **given)
        assert "graft.tree.recurrent_form is 'inputs'" in message
        assert "set --additional-config.graft.tree.recurrent_form to 'auto'" in message
    else:
        validate(GraftConfig.parse({"tree": given}), vllm_config)
    for form in ("auto", "states"):
        validate(GraftConfig.parse({"tree": given | {"recurrent_form": form}}), vllm_config)


def test_graphs_of_mamba2_have_one_width(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_features, "_on_nvidia", lambda: True)
    vllm_config.model_config.is_hybrid = True
    vllm_config.model_config.hf_text_config.model_type = "nemotron_h"
    vllm_config.parallel_config.data_parallel_size = 1
    vllm_config.scheduler_config.scheduler_cls = None
    message = _refusal(vllm_config, shape="auto", recurrent=True)
    assert "graft.tree.shape is 'auto', and the target has Mamba-2 layers" in message
    assert "set --additional-config.graft.tree.shape to 'fixed'" in message


@pytest.mark.parametrize(("topk", "steps", "most"), [(1, 5, 5), (2, 3, 10), (3, 1, 3)])
def test_more_nodes_than_the_tree_holds(vllm_config: Any, topk: int, steps: int, most: int) -> None:
    vllm_config.speculative_config.num_speculative_tokens = most
    validate(GraftConfig.parse({"tree": {"topk": topk, "steps": steps}}), vllm_config)
    vllm_config.speculative_config.num_speculative_tokens = most + 1
    message = _refusal(vllm_config, topk=topk, steps=steps)
    assert f"holds {most} nodes" in message
    assert "--additional-config.graft.tree.topk" in message


def test_ngrams_need_branches(vllm_config: Any) -> None:
    vllm_config.speculative_config.num_speculative_tokens = 5
    validate(GraftConfig.parse({"tree": {"topk": 2, "ngram": True}}), vllm_config)
    validate(GraftConfig.parse({"tree": {"topk": 1, "ngram": False}}), vllm_config)
    message = _refusal(vllm_config, topk=1, ngram=True)
    assert "--additional-config.graft.tree.ngram is given, but drafts are chains" in message
    assert "set --additional-config.graft.tree.topk to 2 or more" in message


def test_a_draft_model_of_its_own(vllm_config: Any) -> None:
    """Its trees are neither for several replicas nor beside graphs of its chain."""
    vllm_config.speculative_config.method = "draft_model"
    vllm_config.parallel_config.data_parallel_size = 1
    validate(GraftConfig.parse({"tree": {}}), vllm_config)
    vllm_config.parallel_config.data_parallel_size = 2
    message = _refusal(vllm_config)
    assert "--data-parallel-size is 2, and speculative_config.method is 'draft_model'" in message
    assert "set --data-parallel-size to 1, or drop --additional-config.graft.tree for" in message
    vllm_config.parallel_config.data_parallel_size = 1
    vllm_config.additional_config = {"graft": {"tree": {}, "draft": {}}}
    message = _refusal(vllm_config)
    assert "graft.draft is given beside --additional-config.graft.tree. Graphs of" in message
    assert "drop --additional-config.graft.draft or --additional-config.graft.tree" in message


@pytest.fixture
def ngrams(vllm_config: Any) -> Any:
    """A configuration without a draft model, where vLLM has the target's in its place."""
    speculative = vllm_config.speculative_config
    speculative.method, speculative.num_speculative_tokens = "ngram", 15
    speculative.draft_model_config = vllm_config.model_config
    speculative.prompt_lookup_min = speculative.prompt_lookup_max = 5
    return vllm_config


@pytest.mark.parametrize(
    ("path", "value", "tree", "words"),
    [
        ("speculative_config.prompt_lookup_max", 33, {}, ("is 33. ", "max to 32 or less")),
        (
            "speculative_config.method",
            "ngram_gpu",
            {"ngram": True},
            "speculative_config.prompt_lookup_max",
        ),
        ("speculative_config.method", "ngram", {"ngram": {"min": 2, "reference": 0}}, "all of it"),
        (
            "speculative_config.method",
            "ngram",
            {"head_dtype": "fp8"},
            ("is 'fp8'", "head: drop --additional-config.graft.tree.head"),
        ),
        (
            "speculative_config.method",
            "ngram",
            {"hot_tokens": 512},
            ("is 512", "head: drop --additional-config.graft.tree.hot_t"),
        ),
        ("speculative_config.num_speculative_tokens", 16, {"topk": 3, "steps": 5}, "15 tokens"),
        ("speculative_config.num_speculative_tokens", 4, {"topk": 3, "nodes": 13}, "12 tokens"),
    ],
)
def test_what_needs_a_draft_model_is_refused_without_one(
    ngrams: Any, path: str, value: Any, tree: dict[str, Any], words: str | tuple[str, ...]
) -> None:
    _set(ngrams, path, value)
    assert _tells(_refusal(ngrams, **tree), words)


def test_ngrams_alone_are_served(ngrams: Any) -> None:
    """Rules for a draft's own layers and for its levels don't count."""
    ngrams.scheduler_config.max_num_seqs = 300
    validate(GraftConfig.parse({"tree": {"topk": 3, "steps": 5}}), ngrams)
    ngrams.speculative_config.draft_model_config.hf_text_config = SimpleNamespace(index_topk=64)
    # How long references are, vLLM has no key for.
    tree = {"topk": 1, "steps": 15, "ngram": {"reference": 64}}
    validate(GraftConfig.parse({"tree": tree}), ngrams)
    # With a draft model both do.
    ngrams.speculative_config.method = "eagle3"
    assert "The draft uses sparse attention" in _refusal(ngrams, topk=10)


def test_the_draft_s_levels_have_to_fit(vllm_config: Any) -> None:
    vllm_config.scheduler_config.max_num_seqs = 300
    message = _refusal(vllm_config, topk=10)
    assert "--additional-config.graft.tree.topk 10" in message
    assert "--max-num-seqs to 204 or less, or --max-num-batched-tokens to 3000 or more" in message
    vllm_config.scheduler_config.max_num_batched_tokens = 3000
    validate(GraftConfig.parse({"tree": {"topk": 10}}), vllm_config)


_LIMITS = [
    ("long_prefill_token_threshold", 31, "stops where the threshold cuts them"),
    ("max_num_scheduled_tokens", 31, "may wait forever"),
    ("max_num_batched_tokens", 31, "may wait forever"),
]


@pytest.fixture
def few(vllm_config: Any) -> Any:
    """Two requests at a time, so that a level of the draft fits into few rows."""
    vllm_config.scheduler_config.max_num_seqs = 2
    vllm_config.scheduler_config.scheduler_cls = None
    return vllm_config


@pytest.mark.parametrize(("name", "value", "words"), _LIMITS)
def test_a_request_has_room_for_a_full_tree(few: Any, name: str, value: int, words: str) -> None:
    setattr(few.scheduler_config, name, value)
    # `nodes` is the number of nodes, where `num_speculative_tokens` is still the depth.
    for tree in ({}, {"topk": 1, "steps": 32}, {"nodes": 31, "steps": 8}):
        message = _refusal(few, **tree)
        key = f"--{name.replace('_', '-')}"
        assert f"{key} is 31, but a full tree" in message
        assert "vLLM gives a request with one token left to compute" in message
        assert f": set {key} to 32 or more, " in message
        assert words in message
        nodes = "--additional-config.graft.tree.nodes" if "nodes" in tree else "speculative_con"
        assert f"set {nodes}" in message
        assert " to 30 or less." in message
        assert len(message.splitlines()) == 2
    validate(GraftConfig(), few)
    validate(GraftConfig.parse({"tree": {"nodes": 30, "steps": 8}}), few)
    setattr(few.scheduler_config, name, value + 1)
    validate(GraftConfig.parse({"tree": {}}), few)


@pytest.mark.parametrize(("name", "value", "words"), _LIMITS)
def test_no_request_gets_a_full_tree_where_their_size_changes(
    few: Any, name: str, value: int, words: str
) -> None:
    setattr(few.scheduler_config, name, value)
    validate(GraftConfig.parse({"tree": {"shape": "auto"}}), few)
    few.speculative_config.num_speculative_tokens_per_batch_size = [(1, 2, 31)]
    validate(GraftConfig.parse({"tree": {}}), few)
    # VLLM drops the table where there are several replicas.
    few.parallel_config.data_parallel_size = 2
    assert words in _refusal(few)


def test_slots_of_the_draft_are_no_room_for_a_tree(few: Any) -> None:
    few.speculative_config.max_num_new_slots_for_drafting = 1
    few.scheduler_config.max_num_batched_tokens = 32
    message = _refusal(few)
    assert "--max-num-batched-tokens is 32" in message
    assert (
        "to 33 or more, or set speculative_config.num_speculative_tokens to 30 or less." in message
    )
    few.scheduler_config.max_num_batched_tokens = 33
    # As vLLM fills it in: what is told about the one is not told about the other.
    few.scheduler_config.max_num_scheduled_tokens = 33
    validate(GraftConfig.parse({"tree": {}}), few)


def test_a_limit_without_room_for_a_node_needs_another_shape(few: Any) -> None:
    few.scheduler_config.long_prefill_token_threshold = 1
    assert "or set --additional-config.graft.tree.shape to 'auto'." in _refusal(few)


def test_more_steps_than_nodes_is_fine(vllm_config: Any) -> None:
    vllm_config.speculative_config.num_speculative_tokens = 2
    validate(GraftConfig.parse({"tree": {"steps": 32}}), vllm_config)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_other_graph_modes_are_fine(vllm_config: Any, mode: str) -> None:
    vllm_config.compilation_config.cudagraph_mode.name = mode
    validate(GraftConfig.parse({"tree": {}}), vllm_config)


def _mtp(config: Any, nodes: int, **draft: Any) -> None:
    config.speculative_config.method = "mtp"
    config.speculative_config.num_speculative_tokens = nodes
    config.speculative_config.draft_model_config.hf_config = SimpleNamespace(**draft)


@pytest.mark.parametrize(
    ("nodes", "draft"),
    [
        (31, {"num_nextn_predict_layers": 1}),
        (31, {"num_nextn_predict_layers": None}),
        (31, {}),
        # Of several modules vLLM's own class for one runs the first.
        (1, {"num_nextn_predict_layers": 3}),
    ],
)
def test_one_mtp_module_is_fine(vllm_config: Any, nodes: int, draft: dict[str, Any]) -> None:
    _mtp(vllm_config, nodes, **draft)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)


@pytest.mark.parametrize(("tokens", "tree"), [(6, {}), (2, {}), (1, {"nodes": 6, "steps": 1})])
def test_several_mtp_modules_are_refused(
    vllm_config: Any, tokens: int, tree: dict[str, int]
) -> None:
    _mtp(vllm_config, tokens, num_nextn_predict_layers=3)
    message = _refusal(vllm_config, **tree)
    assert "The draft has 3 MTP modules (num_nextn_predict_layers)" in message
    assert "drop --additional-config.graft.tree for vLLM's own chain" in message


def _gemma4(config: Any, **draft: Any) -> None:
    _mtp(config, 7, model_type="gemma4_mtp", **draft)
    config.speculative_config.draft_model_config.architectures = ["Gemma4MTPModel"]


def test_an_assistant_that_reads_the_target_s_cache_has_a_drafter(vllm_config: Any) -> None:
    _gemma4(vllm_config)
    validate(GraftConfig.parse({"tree": {"hot_tokens": 64}}), vllm_config)
    message = _refusal(vllm_config, drafter="mtp")
    assert "drafter is 'mtp', and the draft is an assistant. It drafts with a module" in message
    assert "drop --additional-config.graft.tree.drafter" in message
    message = _refusal(vllm_config, draft_window=64)
    assert "draft_window is 64, but the draft reads the target's K/V" in message
    assert "drop --additional-config.graft.tree.draft_window" in message


@pytest.mark.parametrize(("key", "value"), [("hot_tokens", 64), ("head_dtype", "fp8")])
def test_an_assistant_that_computes_some_logits(vllm_config: Any, key: str, value: Any) -> None:
    _gemma4(vllm_config, use_ordered_embeddings=True)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)
    message = _refusal(vllm_config, **{key: value})
    assert f"graft.tree.{key} is {value!r}, and the draft is such an assistant" in message
    assert f"drop --additional-config.graft.tree.{key}." in message


def test_a_third_party_may_draft_with_several_modules(
    vllm_config: Any, entry_point: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plugin:
        @staticmethod
        @hookimpl
        def graft_drafters() -> list[Drafter]:
            speculator = "vllm.theirs:MultiModuleMTPSpeculator"
            return [Drafter("mtp", "x:Y", "", methods=("mtp",), speculator=speculator)]

    found = manager.Manager([entry_point("toy", Plugin)])
    monkeypatch.setattr(manager, "manager", lambda: found)
    _mtp(vllm_config, 6, num_nextn_predict_layers=3)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)


def _block(config: Any, nodes: int, method: str = "dflash", **draft: Any) -> None:
    """Give a draft whose blocks predict 7 tokens, and 16 candidates if it is a DFlash 2."""
    speculative = config.speculative_config
    speculative.method, speculative.parallel_drafting = method, True
    speculative.num_speculative_tokens = nodes
    names = draft.pop("architectures", ["DFlashDraftModel"])
    speculative.draft_model_config.architectures = names
    size = {"block_size": 7 if method == "dspark" else 8}
    speculative.draft_model_config.hf_config = SimpleNamespace(**size, **draft)


_DFLASH2 = {"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_top_k": 16}}


@pytest.mark.parametrize(
    ("nodes", "draft", "tree"),
    [
        (31, {}, {}),
        (31, {}, {"steps": 7, "head_dtype": "auto"}),
        (7, {}, {"nodes": 63, "hot_tokens": None}),
        (31, _DFLASH2, {"topk": 16}),
        (31, {"method": "dspark"}, {"steps": 7}),
    ],
)
def test_block_drafters_are_fine(
    vllm_config: Any, nodes: int, draft: dict[str, Any], tree: dict[str, Any]
) -> None:
    _block(vllm_config, nodes, **draft)
    validate(GraftConfig.parse({"tree": tree}), vllm_config)


@pytest.mark.parametrize(
    ("draft", "tree", "words"),
    [
        ({}, {"steps": 8}, "graft.tree.steps is 8, but a block of the draft predicts 7 tokens"),
        (
            {"method": "dspark", "sample_from_anchor": False},
            {"steps": 7},
            "graft.tree.steps is 7, but a block of the draft predicts 6 tokens (block_size)",
        ),
        ({}, {"nodes": 40}, "num_speculative_tokens, the depth of a tree, is 31, but a block"),
        (_DFLASH2, {"topk": 17}, "but the draft has 16 candidates per position"),
        (
            _DFLASH2,
            {"head_dtype": "fp8"},
            ("head_dtype is 'fp8'", "by their own output heads: set"),
        ),
        (
            {},
            {"hot_tokens": 100},
            ("is 100, and", "learning pays nothing: drop", ", or give a file"),
        ),
        (
            {"method": "dspark"},
            {"hot_tokens": "a.txt"},
            ("is 'a.txt'", "by themselves: drop --additional"),
        ),
        (
            {},
            {"graph_runner": "eager"},
            ("graft.tree.graph_runner is 'eager'", "drop --additional-config"),
        ),
    ],
)
def test_what_block_drafters_lack_is_refused(
    vllm_config: Any, draft: dict[str, Any], tree: dict[str, Any], words: str | tuple[str, ...]
) -> None:
    _block(vllm_config, 31, **draft)
    assert _tells(_refusal(vllm_config, **tree), words)


@pytest.mark.parametrize(("method", "seqs", "most"), [("dflash", 256, 255), ("dspark", 293, 292)])
def test_more_rows_of_a_block_than_a_batch_has_are_refused(
    vllm_config: Any, method: str, seqs: int, most: int
) -> None:
    """The last token of DFlash's predicts nothing, so that its blocks are a row longer."""
    _block(vllm_config, 31, method)
    scheduler = vllm_config.scheduler_config
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2047, seqs
    message = _refusal(vllm_config, steps=7)
    assert "The pass of the draft has" in message
    assert f"set --max-num-seqs to {most} or less" in message


def _xpress(config: Any, nodes: int, **draft: Any) -> None:
    _block(config, nodes, architectures=["DFlashQwen3XPressModel"], **draft)
    config.speculative_config.is_xpress = lambda: True


@pytest.mark.parametrize(
    ("draft", "tree"),
    [
        ({}, {"steps": 15}),
        ({}, {"steps": 7, "head_dtype": "fp8"}),
        ({"xpress_topc": 0, "xpress_block_size": 8}, {"topk": 16, "steps": 7}),
        ({"xpress_topc": 16, "num_speculative_steps": 7}, {"topk": 16, "steps": 7}),
    ],
)
def test_xpress_drafts_are_fine(
    vllm_config: Any, draft: dict[str, Any], tree: dict[str, Any]
) -> None:
    """The block is the refiner's, whatever ``block_size`` says of its backbone."""
    _xpress(vllm_config, 31, **draft)
    vllm_config.scheduler_config.max_num_seqs = 64
    validate(GraftConfig.parse({"tree": tree}), vllm_config)


@pytest.mark.parametrize(
    ("draft", "tree", "words"),
    [
        ({}, {"steps": 16}, "graft.tree.steps is 16, but a block of the draft predicts 15 tokens"),
        ({"xpress_block_size": 6}, {"steps": 6}, "is 6, but a block of the draft predicts 5"),
        ({"num_speculative_steps": 4}, {"steps": 6}, "is 6, but a block of the draft predicts 4"),
        ({"xpress_topc": 6}, {"topk": 7}, "draft has 6 candidates per position (xpress_topc)"),
        ({}, {"hot_tokens": "a.txt"}, ("is 'a.txt'", "by themselves: drop --additional")),
        # Its passes are over whole blocks, however deep the trees are.
        ({}, {"steps": 3}, "The pass of the draft has 2048 rows (--max-num-seqs 128 times 16"),
    ],
)
def test_what_xpress_drafts_lack_is_refused(
    vllm_config: Any, draft: dict[str, Any], tree: dict[str, Any], words: str | tuple[str, ...]
) -> None:
    _xpress(vllm_config, 31, **draft)
    scheduler = vllm_config.scheduler_config
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2047, 128
    assert _tells(_refusal(vllm_config, **tree), words)


@pytest.mark.parametrize("topk", [1, 8])
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_of_drafts_with_latents_sparse_ones_are_refused(
    vllm_config: Any, method: str, topk: int
) -> None:
    """A chain is drafted by the same levels as a tree."""
    speculative = vllm_config.speculative_config
    speculative.method, speculative.num_speculative_tokens = method, 3
    draft = speculative.draft_model_config
    draft.use_mla, draft.hf_text_config = True, SimpleNamespace(kv_lora_rank=512)
    tree = {"topk": topk, "steps": 3}
    validate(GraftConfig.parse({"tree": tree}), vllm_config)
    draft.hf_text_config.index_topk = 2048
    message = _refusal(vllm_config, **tree)
    assert "The draft uses sparse attention. An indexer picks the keys of a row" in message
    assert "where a tree's are not: drop --additional-config.graft.tree for vLLM's" in message


def test_a_sparse_target_gets_a_chain_of_a_draft_with_latents(vllm_config: Any) -> None:
    vllm_config.model_config.use_mla = True
    vllm_config.model_config.hf_text_config.index_topk = 2048
    draft = vllm_config.speculative_config.draft_model_config
    draft.use_mla, draft.hf_text_config = True, SimpleNamespace(kv_lora_rank=512)
    assert "The target uses sparse attention" in _refusal(vllm_config, fallback="refuse")
    tree = GraftConfig.parse({"tree": {"topk": 1, "steps": 31}})
    validate(tree, vllm_config)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_a_block_draft_with_latents_is_refused(vllm_config: Any, method: str) -> None:
    _block(vllm_config, 31, method)
    vllm_config.speculative_config.draft_model_config.use_mla = True
    message = _refusal(vllm_config)
    assert (
        f"MLA attention, and speculative_config.method is '{method}'. Nobody has tried" in message
    )


def test_a_draft_model_with_latents_is_refused(vllm_config: Any) -> None:
    speculative = vllm_config.speculative_config
    speculative.method, speculative.draft_model_config.use_mla = "draft_model", True
    vllm_config.parallel_config.data_parallel_size = 1
    message = _refusal(vllm_config)
    assert "MLA attention, and speculative_config.method is 'draft_model'" in message
    assert "for chains too: use another draft" in message


@pytest.fixture
def hot_file(tmp_path: Path) -> str:
    file = tmp_path / "hot.json"
    file.write_text(json.dumps(list(range(16))))
    return str(file)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_hot_tokens_are_for_every_head(vllm_config: Any, method: str, hot_file: str) -> None:
    vllm_config.speculative_config.method = method
    for hot_tokens in (hot_file, 512):
        validate(GraftConfig.parse({"tree": {"hot_tokens": hot_tokens}}), vllm_config)


@pytest.mark.parametrize(
    ("draft", "method", "words"),
    [
        ({"use_mla": True}, "eagle3", "graft.tree.draft_window is 64, but the draft uses MLA"),
        (
            {"sliding_window": 128},
            "mtp",
            ("window of 128 already", "drop --additional-config.graft.tree.draft_w"),
        ),
        (
            {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
            "eagle",
            "have a sliding window of 128 already",
        ),
        ({}, "draft_model", "is 64, but speculative_config.method is 'draft_model'"),
        ({}, "ngram", "is 64, but speculative_config.method is 'ngram'"),
    ],
)
def test_windows_of_other_drafts_are_refused(
    vllm_config: Any, draft: dict[str, Any], method: str, words: str | tuple[str, ...]
) -> None:
    speculative = vllm_config.speculative_config
    speculative.method = method
    vllm_config.parallel_config.data_parallel_size = 1
    speculative.draft_model_config.use_mla = draft.get("use_mla", False)
    speculative.draft_model_config.hf_text_config = SimpleNamespace(**draft)
    assert _tells(_refusal(vllm_config, draft_window=64), words)


@pytest.mark.parametrize(
    "draft",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "layer_types": ["full_attention"]},
    ],
)
def test_windows_of_plain_drafts_are_served(vllm_config: Any, draft: dict[str, Any]) -> None:
    vllm_config.speculative_config.draft_model_config.hf_text_config = SimpleNamespace(**draft)
    validate(GraftConfig.parse({"tree": {"draft_window": 64}}), vllm_config)


def test_a_file_of_hot_tokens_may_be_below_the_home_directory(
    vllm_config: Any, hot_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(Path(hot_file).parent))
    validate(GraftConfig.parse({"tree": {"hot_tokens": "~/hot.json"}}), vllm_config)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't read"),
        ("[1, 2", "can't read"),
        ("[1, 1000]", "holds ids from 1 to 1000, but the target's vocabulary has ids 0 to 999"),
        ("[1, 2, 3]", "lists 3 tokens, fewer than --additional-config.graft.tree.topk 8"),
    ],
)
def test_a_wrong_file_of_hot_tokens_is_refused(
    vllm_config: Any, hot_file: str, content: str | None, words: str
) -> None:
    Path(hot_file).unlink() if content is None else Path(hot_file).write_text(content)
    lines = _refusal(vllm_config, hot_tokens=hot_file).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("  --additional-config.graft.tree.hot_tokens: ")
    assert words in lines[1]
    assert hot_file in lines[1]


@pytest.mark.parametrize(("size", "draft_vocab"), [(7, None), (1000, None), (64, 64)])
def test_a_wrong_number_of_hot_tokens_is_refused(
    vllm_config: Any, size: int, draft_vocab: int | None
) -> None:
    vllm_config.speculative_config.draft_model_config.hf_config.draft_vocab_size = draft_vocab
    message = _refusal(vllm_config, hot_tokens=size)
    assert f"graft.tree.hot_tokens is {size}, but must be at least" in message
    assert f"vocabulary of {draft_vocab or 1000} tokens" in message


def _platform(device_type: str, capability: tuple[int, int] | None, cuda: bool = True) -> Any:
    """Make a stand-in for vLLM's platform, which asks NVML."""
    found = None
    if capability is not None:
        version = ".".join(map(str, capability))
        found = SimpleNamespace(
            major=capability[0], minor=capability[1], as_version_str=lambda: version
        )
    return SimpleNamespace(
        device_type=device_type,
        is_cuda=lambda: cuda and device_type == "cuda",
        get_device_capability=lambda: found,
    )


@pytest.fixture
def on(fake_module: Callable[..., ModuleType]) -> Callable[..., None]:
    """Run on another platform."""
    envs = fake_module("vllm.envs", VLLM_BATCH_INVARIANT=False)

    def choose(platform: Any, batch_invariant: bool = False) -> None:
        envs.VLLM_BATCH_INVARIANT = batch_invariant
        fake_module("vllm", envs=envs)
        fake_module("vllm.platforms", current_platform=platform)

    return choose


def test_an_fp8_head_needs_a_device_that_multiplies_them(
    vllm_config: Any, on: Callable[..., None]
) -> None:
    config = GraftConfig.parse({"tree": {"head_dtype": "fp8"}})
    for platform in (
        *(_platform("cuda", (8, 9)), _platform("cuda", (9, 0)), _platform("cuda", (12, 0))),
        *(_platform("cuda", None), _platform("cpu", None)),
    ):
        on(platform)
        validate(config, vllm_config)
    on(_platform("cuda", (8, 6)))
    message = _refusal(vllm_config, head_dtype="fp8")
    assert "graft.tree.head_dtype is 'fp8'" in message
    assert (
        "has capability 8.6. FP8 products need an NVIDIA GPU of compute capability 8.9" in message
    )
    assert "set --additional-config.graft.tree.head_dtype to 'auto'" in message
    validate(GraftConfig.parse({"tree": {}}), vllm_config)
    on(_platform("cuda", (9, 4), cuda=False))
    message = _refusal(vllm_config, head_dtype="fp8")
    assert "head_dtype is 'fp8', and this device is not NVIDIA's. FP8 products need" in message


@pytest.mark.parametrize(
    ("platform", "options", "words"),
    [
        (_platform("cpu", None), {}, "the platform cpu has no FlashAttention 3"),
        (_platform("cuda", (9, 4), cuda=False), {}, "the platform cuda has no FlashAttention 3"),
        (_platform("cuda", (8, 0)), {}, "for compute capability 9, and this device has 8.0"),
        (_platform("cuda", (10, 0)), {}, "for compute capability 9, and this device has 10.0"),
        (_platform("cuda", (9, 0)), {"flash_attn_version": 2}, "flash_attn_version is 2, not 3"),
        (
            _platform("cuda", (9, 0)),
            {"backend": SimpleNamespace(name="TRITON_ATTN")},
            "the attention backend is TRITON_ATTN, not FLASH_ATTN",
        ),
    ],
)
def test_flash_is_refused_where_there_is_none(
    vllm_config: Any, on: Callable[..., None], platform: Any, options: dict[str, Any], words: str
) -> None:
    on(platform)
    vars(vllm_config.attention_config).update(options)
    message = _refusal(vllm_config, attention="flash")
    assert "graft.tree.attention is 'flash', but " in message
    assert words in message
    validate(GraftConfig.parse({"tree": {"attention": "auto"}}), vllm_config)


def test_mla_is_served_by_backends_of_latents(vllm_config: Any, on: Callable[..., None]) -> None:
    config = GraftConfig.parse({"tree": {}})
    vllm_config.model_config.use_mla = True
    validate(config, vllm_config)
    for backend in ("TRITON_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "CPU_MLA", "TRITON_ATTN"):
        vllm_config.attention_config.backend = SimpleNamespace(name=backend)
        validate(config, vllm_config)
    vllm_config.attention_config.backend = SimpleNamespace(name="CUTLASS_MLA")
    assert "CUTLASS_MLA, but trees on MLA need one of TRITON_MLA, " in _refusal(vllm_config)
    # Without MLA they are none that trees have.
    vllm_config.model_config.use_mla = False
    vllm_config.attention_config.backend = SimpleNamespace(name="TRITON_MLA")
    assert "TRITON_MLA, but trees need one of FLASH_ATTN, " in _refusal(vllm_config)


def test_flash_is_refused_for_latents_in_fp8(vllm_config: Any, on: Callable[..., None]) -> None:
    on(_platform("cuda", (9, 0)))
    config = GraftConfig.parse({"tree": {"attention": "flash"}})
    vllm_config.model_config.use_mla = True
    for name in ("FLASH_ATTN_MLA", "FLASHMLA"):
        vllm_config.attention_config.backend = SimpleNamespace(name=name)
        validate(config, vllm_config)
    vllm_config.cache_config.cache_dtype = "fp8_e4m3"
    words = "graft.tree.attention is 'flash', but K/V of MLA is in fp8_e4m3"
    assert words in _refusal(vllm_config, attention="flash")


def test_flash_is_served_on_hopper(vllm_config: Any, on: Callable[..., None]) -> None:
    config = GraftConfig.parse({"tree": {"attention": "flash"}})
    on(_platform("cuda", (9, 0)))
    validate(config, vllm_config)
    vllm_config.attention_config.backend = SimpleNamespace(name="FLASH_ATTN")
    validate(config, vllm_config)
    on(_platform("cuda", (9, 0)), batch_invariant=True)
    assert "VLLM_BATCH_INVARIANT is set" in _refusal(vllm_config, attention="flash")


@pytest.mark.parametrize(
    ("name", "value"),
    [("sliding_window", 4096), ("interleaved_sliding_window", 512), ("num_kv_shared_layers", 10)],
)
def test_windows_and_shared_kv_are_served(vllm_config: Any, name: str, value: int) -> None:
    setattr(vllm_config.model_config.hf_text_config, name, value)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)


def test_chunks_are_served(vllm_config: Any) -> None:
    vllm_config.model_config.hf_text_config.attention_chunk_size = 1024
    validate(GraftConfig.parse({"tree": {}}), vllm_config)


def test_drafts_have_no_chunks(vllm_config: Any) -> None:
    draft = vllm_config.speculative_config.draft_model_config
    draft.hf_text_config = SimpleNamespace(attention_chunk_size=64)
    message = _refusal(vllm_config)
    assert "The draft has chunked-attention layers (chunk 64). Rows of a level" in message
    assert "drop --additional-config.graft.tree for vLLM's own chain" in message


def test_chunks_that_no_layer_uses_are_fine(vllm_config: Any) -> None:
    text = SimpleNamespace(attention_chunk_size=64, layer_types=["full_attention"] * 2)
    vllm_config.speculative_config.draft_model_config.hf_text_config = text
    validate(GraftConfig.parse({"tree": {}}), vllm_config)
    text.layer_types = ["full_attention", "sliding_attention", "chunked_attention"]
    assert "The draft has chunked-attention layers (chunk 64)" in _refusal(vllm_config)


def test_a_derived_draft_configuration_is_judged_by_its_target(vllm_config: Any) -> None:
    # vLLM runs the check again for configurations whose model_config is the draft's.
    vllm_config.model_config = SimpleNamespace(is_hybrid=True)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)


def test_our_connector_is_served_beside_trees(vllm_config: Any) -> None:
    transfer = SimpleNamespace(kv_connector="HiCacheConnector")
    _set(vllm_config, "kv_transfer_config", transfer)
    validate(GraftConfig.parse({"tree": {}}), vllm_config)
