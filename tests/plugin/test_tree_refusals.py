"""Each combination that a tree cannot serve is refused, with advice on what to change."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.platforms import platform
from tests.support.refusals import validate
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.markers import hookimpl
from vllm_graft.config import GraftConfig
from vllm_graft.hooks import manager
from vllm_graft.hooks.entries import Drafter
from vllm_graft.spec_decode.targets.recurrent import recurrent_features

Tree = dict[str, Any]
KEY = "--additional-config.graft.tree"


def _set(config: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    assert hasattr(config, name) or "hf_text_config" in path, f"{path} is not in the stand-in"
    setattr(config, name, value)


def _serve(config: Any, **tree: Any) -> None:
    validate(GraftConfig.parse({"tree": tree}), config)


def _refusal(config: Any, *words: str, **tree: Any) -> str:
    """Return why a tree is refused; the message holds `words`, which may be several by ``|``."""
    with pytest.raises(ConfigError) as caught:
        _serve(config, **tree)
    message = str(caught.value)
    assert all(each in message for text in words for each in text.split("|")), message
    return message


@pytest.fixture
def config(vllm_config: Any) -> Any:
    return vllm_config


# fmt: off
CASES: list[tuple[str, Any, str]] = [
    ("speculative_config", None, "add --speculative-config"),
    ("speculative_config.method", "suffix", "speculative_config.method is 'suffix'. |"
     "set speculative_config.method to 'dflash', 'draft_model', 'dspark',"),
    ("speculative_config.num_speculative_tokens", 64, "is 64. |num_speculative_tokens to 1..63"),
    ("speculative_config.num_speculative_tokens", 0, "is 0. |num_speculative_tokens to 1..63"),
    ("speculative_config.draft_sample_method", "probabilistic", "draft_sample_method"),
    ("speculative_config.rejection_sample_method", "block", "method is 'block'|to 'standard'"),
    ("speculative_config.rejection_sample_method", "synthetic", "_method to 'standard'"),
    ("speculative_config.use_local_argmax_reduction", True, "use_local_argmax_reduction"),
    ("speculative_config.parallel_drafting", True, "parallel_drafting"),
    ("speculative_config.enable_adaptive_verification", True, "enable_adaptive_verification"),
    ("use_v2_model_runner", False, "unset VLLM_USE_V2_MODEL_RUNNER|VLLM_GRAFT_INTERPRET=1"),
    ("compilation_config.cudagraph_mode", SimpleNamespace(name="FULL"),
     "cudagraph_mode is FULL. |FULL_DECODE_ONLY, PIECEWISE or NONE"),
    ("parallel_config.pipeline_parallel_size", 2, "-size is 2. |--pipeline-parallel-size to 1"),
    ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size is 2"),
    ("parallel_config.prefill_context_parallel_size", 4, "--prefill-context-parallel-size is 4"),
    ("parallel_config.use_ubatching", True, "drop --enable-dbo and --ubatch-size"),
    ("parallel_config.enable_batch_sharded_sampling", True, "--enable-batch-sharded-sampling"),
    ("model_config.is_hybrid", True, "Mamba"),
    ("model_config.is_attention_free", True, "Mamba"),
    ("model_config.hf_text_config.index_topk", 2048, "uses sparse attention. An indexer picks"),
    ("model_config.hf_text_config.sparse_attention_config", {"sparse_topk_blocks": 16},
     "uses sparse attention. An indexer picks"),
    ("model_config.hf_text_config.index_topk_blocks", 16, "uses sparse attention. An indexer"),
    ("speculative_config.draft_model_config.hf_text_config", SimpleNamespace(index_topk=2048),
     "The draft uses sparse attention. An indexer"),
    ("model_config.is_encoder_decoder", True, "encoder-decoder"),
    ("model_config.uses_alibi", True, "ALiBi"),
    ("model_config.return_sampling_mask", True, "--return-sampling-mask"),
    ("model_config.enable_trace_replay", True, "--enable-trace-replay"),
    ("model_config.logits_processors", ["mine:Processor"], "--logits-processors"),
    ("scheduler_config.max_num_seqs", 257, "has 2056 rows (--max-num-seqs 257 times"),
    ("scheduler_config.max_num_batched_tokens", 2047, "set --max-num-seqs to 255 or less"),
    ("watermark_config", object(), "--watermark-config"),
]
# fmt: on


@pytest.mark.parametrize(("path", "value", "words"), CASES)
def test_refused(config: Any, path: str, value: Any, words: str) -> None:
    _set(config, path, value)
    validate(GraftConfig(), config)
    message = _refusal(config, words)
    assert message.startswith(f"{KEY} asks for tree drafts")
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize(
    ("path", "value", "tree"),
    [
        ("use_v2_model_runner", True, {}),
        ("speculative_config.num_speculative_tokens", 2, {"steps": 32}),
        *(("compilation_config.cudagraph_mode.name", mode, {})
          for mode in ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")),
        ("model_config.hf_text_config.sliding_window", 4096, {}),
        ("model_config.hf_text_config.interleaved_sliding_window", 512, {}),
        ("model_config.hf_text_config.num_kv_shared_layers", 10, {}),
        ("model_config.hf_text_config.attention_chunk_size", 1024, {}),
        # VLLM runs the check again for configurations whose model_config is the draft's.
        ("model_config", SimpleNamespace(is_hybrid=True), {}),
        ("kv_transfer_config", SimpleNamespace(kv_connector="AnyOther"), {}),
        *(("speculative_config.draft_model_config.hf_text_config", SimpleNamespace(**draft),
           {"draft_window": 64})
          for draft in ({}, {"sliding_window": None},
                        {"sliding_window": 4096, "use_sliding_window": False},
                        {"sliding_window": 4096, "layer_types": ["full_attention"]})),
    ],
)  # fmt: skip
def test_served(config: Any, path: str, value: Any, tree: Tree) -> None:
    _set(config, path, value)
    _serve(config, **tree)


@pytest.mark.parametrize(
    ("connectors", "refused"),
    [
        (["HiCacheConnector"], []),
        (["NixlConnector"], ["NixlConnector"]),
        (["HiCacheConnector", "NixlConnector", "Other"], ["NixlConnector", "Other"]),
        (["HiCacheConnector"] * 2, []),
    ],
)
def test_recurrent_layers_have_a_connector_of_ours(
    config: Any, connectors: list[str], refused: list[str]
) -> None:
    config.model_config.is_hybrid = True
    before = _refusal(config)
    several = [{"kv_connector": name} for name in connectors]
    config.kv_transfer_config = SimpleNamespace(
        kv_connector="MultiConnector" if len(several) > 1 else connectors[0],
        kv_connector_extra_config={"connectors": several} if len(several) > 1 else {},
    )
    more = _refusal(config).splitlines()[len(before.splitlines()) :]
    assert [line.split("'")[1] for line in more] == refused
    assert all("recurrent layers" in line for line in more)


def test_every_problem_is_named_at_once(config: Any) -> None:
    config.parallel_config.pipeline_parallel_size = 2
    config.model_config.is_hybrid = True
    assert len(_refusal(config).splitlines()) == 3


@pytest.fixture
def recurrent(config: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Give the target recurrent layers of a kind, on a GPU that has kernels for them."""

    def choose(kind: str) -> Any:
        monkeypatch.setattr(recurrent_features, "_on_nvidia", lambda: True)
        config.model_config.is_hybrid = kind != "llama"
        config.model_config.hf_text_config.model_type = kind
        return config

    return choose


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h", "kimi_linear"])
def test_recurrent_layers_need_a_state_per_node(recurrent: Any, kind: str) -> None:
    config = recurrent(kind)
    _serve(config, recurrent=True)
    if kind == "qwen3_next":
        _serve(config)
    else:
        _refusal(config, "graft.tree.recurrent is not given")
    _refusal(config, "graft.tree.recurrent is false|graft.tree.recurrent to true", recurrent=False)
    config.cache_config = SimpleNamespace(use_replayssm=True)
    _refusal(config, f"no state per node|{KEY}.topk to 1", recurrent=True)


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
    recurrent: Any, kind: str, more: Tree, refused: bool
) -> None:
    config, given = recurrent(kind), {"recurrent": True, "recurrent_form": "inputs", **more}
    if refused:
        words = f"graft.tree.recurrent_form is 'inputs'|set {KEY}.recurrent_form to 'auto'"
        _refusal(config, words, **given)
    else:
        _serve(config, **given)
    for form in ("auto", "states"):
        _serve(config, **given | {"recurrent_form": form})


def test_graphs_of_mamba2_have_one_width(recurrent: Any) -> None:
    config = recurrent("nemotron_h")
    config.scheduler_config.scheduler_cls = None
    words = "graft.tree.shape is 'auto', and the target has Mamba-2 layers"
    _refusal(config, words, f"set {KEY}.shape to 'fixed'", shape="auto", recurrent=True)


@pytest.mark.parametrize(("topk", "steps", "most"), [(1, 5, 5), (2, 3, 10), (3, 1, 3)])
def test_more_nodes_than_the_tree_holds(config: Any, topk: int, steps: int, most: int) -> None:
    config.speculative_config.num_speculative_tokens = most
    _serve(config, topk=topk, steps=steps)
    config.speculative_config.num_speculative_tokens = most + 1
    _refusal(config, f"holds {most} nodes|{KEY}.topk", topk=topk, steps=steps)


def test_ngrams_need_branches(config: Any) -> None:
    config.speculative_config.num_speculative_tokens = 5
    _serve(config, topk=2, ngram=True)
    _serve(config, topk=1, ngram=False)
    words = f"{KEY}.ngram is given, but drafts are chains|set {KEY}.topk to 2 or more"
    _refusal(config, words, topk=1, ngram=True)


def test_a_draft_model_of_its_own(config: Any) -> None:
    """Its trees are neither for several replicas nor beside graphs of its chain."""
    config.speculative_config.method = "draft_model"
    _serve(config)
    config.parallel_config.data_parallel_size = 2
    words = "--data-parallel-size is 2, and speculative_config.method is 'draft_model'"
    _refusal(config, words, f"set --data-parallel-size to 1, or drop {KEY} for")
    config.parallel_config.data_parallel_size = 1
    config.additional_config = {"graft": {"tree": {}, "draft": {}}}
    words = f"graft.draft is given beside {KEY}. Graphs of"
    _refusal(config, words, f"drop --additional-config.graft.draft or {KEY}")


@pytest.fixture
def ngrams(config: Any) -> Any:
    """A configuration without a draft model, where vLLM has the target's in its place."""
    speculative = config.speculative_config
    speculative.method, speculative.num_speculative_tokens = "ngram", 15
    speculative.draft_model_config = config.model_config
    speculative.prompt_lookup_min = speculative.prompt_lookup_max = 5
    return config


def test_a_memory_is_for_ngrams_and_has_room(config: Any) -> None:
    config.model_config.max_model_len = 4096
    _serve(config, ngram=True, memory=True)
    _refusal(config, f"memory is given, and {KEY}.ngram is not|ngram to true", memory=True)
    small, large = "1196032B", "1.2GB"
    for size in (small, large):
        words = f"{KEY}.memory.bytes is |with --max-num-seqs 256|it may be 1218576 to 119"
        _refusal(config, words, ngram=True, memory={"bytes": size})
    _serve(config, ngram=True, memory={"bytes": 1218576})


def test_corpora_are_files_with_room(config: Any, tmp_path: Path) -> None:
    config.model_config.max_model_len = 4096
    file = tmp_path / "a.jsonl"
    file.write_text('"one"')
    memory: dict[str, Any] = {"corpora": [str(file)]}
    words = f"{KEY}.memory.corpora_bytes is 0|set {KEY}.memory.corpora_bytes to 64MiB"
    _refusal(config, words, ngram=True, memory=memory)
    memory["corpora_bytes"] = "1MiB"
    _serve(config, ngram=True, memory=memory)
    file.write_text("one")
    _refusal(config, f"{KEY}.memory.corpora: can't read|change", ngram=True, memory=memory)
    memory = {"corpora_bytes": "1.2GB"}
    words = f"{KEY}.memory.corpora_bytes is 12|lower {KEY}.memory.corpora_bytes"
    _refusal(config, words, ngram=True, memory=memory)


def test_ngrams_alone_may_have_a_memory(ngrams: Any) -> None:
    ngrams.model_config.max_model_len = 4096
    _serve(ngrams, memory=True)


@pytest.mark.parametrize(
    ("name", "value", "tree", "words"),
    [
        ("prompt_lookup_max", 33, {}, "is 33. |max to 32 or less"),
        ("method", "ngram_gpu", {"ngram": True}, "speculative_config.prompt_lookup_max"),
        ("method", "ngram", {"ngram": {"min": 2, "reference": 0}}, "all of it"),
        ("method", "ngram", {"head_dtype": "fp8"}, f"is 'fp8'|head: drop {KEY}.head"),
        ("method", "ngram", {"hot_tokens": 512}, f"is 512|head: drop {KEY}.hot_t"),
        ("num_speculative_tokens", 16, {"topk": 3, "steps": 5}, "15 tokens"),
        ("num_speculative_tokens", 4, {"topk": 3, "nodes": 13}, "12 tokens"),
    ],
)  # fmt: skip
def test_what_needs_a_draft_model_is_refused_without_one(
    ngrams: Any, name: str, value: Any, tree: Tree, words: str
) -> None:
    _set(ngrams, f"speculative_config.{name}", value)
    _refusal(ngrams, words, **tree)


def test_ngrams_alone_are_served(ngrams: Any) -> None:
    """Rules for a draft's own layers and for its levels don't count."""
    ngrams.scheduler_config.max_num_seqs = 300
    _serve(ngrams, topk=3, steps=5)
    ngrams.speculative_config.draft_model_config.hf_text_config = SimpleNamespace(index_topk=64)
    # How long references are, vLLM has no key for.
    _serve(ngrams, topk=1, steps=15, ngram={"reference": 64})
    # With a draft model both do.
    ngrams.speculative_config.method = "eagle3"
    _refusal(ngrams, "The draft uses sparse attention", topk=10)


def test_the_draft_s_levels_have_to_fit(config: Any) -> None:
    config.scheduler_config.max_num_seqs = 300
    words = "--max-num-seqs to 204 or less, or --max-num-batched-tokens to 3000 or more"
    _refusal(config, f"{KEY}.topk 10", words, topk=10)
    config.scheduler_config.max_num_batched_tokens = 3000
    _serve(config, topk=10)


_LIMITS = pytest.mark.parametrize(
    ("name", "words"),
    [
        ("long_prefill_token_threshold", "stops where the threshold cuts them"),
        ("max_num_scheduled_tokens", "may wait forever"),
        ("max_num_batched_tokens", "may wait forever"),
    ],
)


@pytest.fixture
def few(config: Any) -> Any:
    """Two requests at a time, so that a level of the draft fits into few rows."""
    config.scheduler_config.max_num_seqs = 2
    config.scheduler_config.scheduler_cls = None
    return config


@_LIMITS
def test_a_request_has_room_for_a_full_tree(few: Any, name: str, words: str) -> None:
    setattr(few.scheduler_config, name, 31)
    key = f"--{name.replace('_', '-')}"
    # `nodes` is the number of nodes, where `num_speculative_tokens` is still the depth.
    trees: list[Tree] = [{}, {"topk": 1, "steps": 32}, {"nodes": 31, "steps": 8}]
    for tree in trees:
        message = _refusal(few, f"{key} is 31, but a full tree|{words}", **tree)
        assert "vLLM gives a request with one token left to compute" in message
        assert f": set {key} to 32 or more, " in message
        nodes = f"{KEY}.nodes" if "nodes" in tree else "speculative_con"
        assert f"set {nodes}" in message
        assert " to 30 or less." in message
        assert len(message.splitlines()) == 2
    validate(GraftConfig(), few)
    _serve(few, nodes=30, steps=8)
    setattr(few.scheduler_config, name, 32)
    _serve(few)


@_LIMITS
def test_no_request_gets_a_full_tree_where_their_size_changes(
    few: Any, name: str, words: str
) -> None:
    setattr(few.scheduler_config, name, 31)
    _serve(few, shape="auto")
    few.speculative_config.num_speculative_tokens_per_batch_size = [(1, 2, 31)]
    _serve(few)
    few.speculative_config.num_speculative_tokens_per_batch_size = None
    _refusal(few, words)


@pytest.mark.parametrize("name", ["max_num_scheduled_tokens", "max_num_batched_tokens"])
def test_without_chunks_a_step_holds_the_longest_prompt(few: Any, name: str) -> None:
    key, scheduler = f"--{name.replace('_', '-')}", few.scheduler_config
    setattr(scheduler, name, 1022)
    _serve(few)
    scheduler.enable_chunked_prefill = False
    advice = f": set {key} to 1023 or more, --max-model-len to 1023 or less, or drop --no-enable-"
    message = _refusal(few, f"{key} is 1022, but without chunked prefill|waits forever", advice)
    assert len(message.splitlines()) == 2
    setattr(scheduler, name, 1023)
    _serve(few)
    # Slots of the draft are no room for a prompt, as of a block of drafts.
    few.speculative_config.max_num_new_slots_for_drafting = 31
    if name == "max_num_batched_tokens":
        _refusal(few, f"{key} is 1023, but|needs 1054 rows|--max-model-len to 993 or less")
    scheduler.max_num_batched_tokens = 1054
    _serve(few)


def test_slots_of_the_draft_are_no_room_for_a_tree(few: Any) -> None:
    few.speculative_config.max_num_new_slots_for_drafting = 1
    few.scheduler_config.max_num_batched_tokens = 32
    words = "to 33 or more, or set speculative_config.num_speculative_tokens to 30 or less."
    _refusal(few, "--max-num-batched-tokens is 32", words)
    few.scheduler_config.max_num_batched_tokens = 33
    # As vLLM fills it in: what is told about the one is not told about the other.
    few.scheduler_config.max_num_scheduled_tokens = 33
    _serve(few)


def test_a_limit_without_room_for_a_node_needs_another_shape(few: Any) -> None:
    few.scheduler_config.long_prefill_token_threshold = 1
    _refusal(few, f"or set {KEY}.shape to 'auto'.")


def _mtp(config: Any, nodes: int, **draft: Any) -> None:
    config.speculative_config.method = "mtp"
    config.speculative_config.num_speculative_tokens = nodes
    config.speculative_config.draft_model_config.hf_config = SimpleNamespace(**draft)


# Of several modules vLLM's own class for one runs the first.
@pytest.mark.parametrize(
    ("nodes", "draft"), [(31, {"num_nextn_predict_layers": n}) for n in (1, None)]
    + [(31, {}), (1, {"num_nextn_predict_layers": 3})],
)  # fmt: skip
def test_one_mtp_module_is_fine(config: Any, nodes: int, draft: dict[str, Any]) -> None:
    _mtp(config, nodes, **draft)
    _serve(config)


@pytest.mark.parametrize(("tokens", "tree"), [(6, {}), (2, {}), (1, {"nodes": 6, "steps": 1})])
def test_several_mtp_modules_are_refused(config: Any, tokens: int, tree: Tree) -> None:
    _mtp(config, tokens, num_nextn_predict_layers=3)
    words = "The draft has 3 MTP modules (num_nextn_predict_layers)"
    _refusal(config, words, f"drop {KEY} for vLLM's own chain", **tree)


def _gemma4(config: Any, **draft: Any) -> None:
    _mtp(config, 7, model_type="gemma4_mtp", **draft)
    config.speculative_config.draft_model_config.architectures = ["Gemma4MTPModel"]


def test_an_assistant_that_reads_the_target_s_cache_has_a_drafter(config: Any) -> None:
    _gemma4(config)
    _serve(config, hot_tokens=64)
    words = "drafter is 'mtp', and the draft is an assistant. It drafts with a module"
    _refusal(config, words, f"drop {KEY}.drafter", drafter="mtp")
    words = "draft_window is 64, but the draft reads the target's K/V"
    _refusal(config, words, f"drop {KEY}.draft_window", draft_window=64)


@pytest.mark.parametrize(("key", "value"), [("hot_tokens", 64), ("head_dtype", "fp8")])
def test_an_assistant_that_computes_some_logits(config: Any, key: str, value: Any) -> None:
    _gemma4(config, use_ordered_embeddings=True)
    _serve(config)
    words = f"graft.tree.{key} is {value!r}, and the draft is such an assistant|drop {KEY}.{key}."
    _refusal(config, words, **{key: value})


def test_a_third_party_may_draft_with_several_modules(
    config: Any, entry_point: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plugin:
        @staticmethod
        @hookimpl
        def graft_drafters() -> list[Drafter]:
            speculator = "vllm.theirs:MultiModuleMTPSpeculator"
            return [Drafter("mtp", "x:Y", "", methods=("mtp",), speculator=speculator)]

    found = manager.Manager([entry_point("toy", Plugin)])
    monkeypatch.setattr(manager, "manager", lambda: found)
    _mtp(config, 6, num_nextn_predict_layers=3)
    _serve(config)


def _block(config: Any, nodes: int, method: str = "dflash", **draft: Any) -> None:
    """Give a draft whose blocks predict 7 tokens, and 16 candidates if it is a DFlash 2."""
    speculative = config.speculative_config
    speculative.method, speculative.parallel_drafting = method, True
    speculative.num_speculative_tokens = nodes
    names = draft.pop("architectures", ["DFlashDraftModel"])
    speculative.draft_model_config.architectures = names
    size = {"block_size": 7 if method == "dspark" else 8}
    speculative.draft_model_config.hf_config = SimpleNamespace(**size, **draft)


def _xpress(config: Any, nodes: int, **draft: Any) -> None:
    _block(config, nodes, architectures=["DFlashQwen3XPressModel"], **draft)
    config.scheduler_config.max_num_seqs = 64


_DFLASH2 = {"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_top_k": 16}}


# The block is XPress's refiner's, whatever ``block_size`` says of its backbone.
@pytest.mark.parametrize(
    ("make", "nodes", "draft", "tree"),
    [
        (_block, 31, {}, {}),
        (_block, 31, {}, {"steps": 7, "head_dtype": "auto"}),
        (_block, 7, {}, {"nodes": 63, "hot_tokens": None}),
        (_block, 31, _DFLASH2, {"topk": 16}),
        (_block, 31, {"method": "dspark"}, {"steps": 7}),
        (_xpress, 31, {}, {"steps": 15}),
        (_xpress, 31, {}, {"steps": 7, "head_dtype": "fp8"}),
        (_xpress, 31, {"xpress_topc": 0, "xpress_block_size": 8}, {"topk": 16, "steps": 7}),
        (_xpress, 31, {"xpress_topc": 16, "num_speculative_steps": 7}, {"topk": 16, "steps": 7}),
    ],
)  # fmt: skip
def test_block_drafters_are_fine(
    config: Any, make: Callable[..., None], nodes: int, draft: dict[str, Any], tree: Tree
) -> None:
    make(config, nodes, **draft)
    _serve(config, **tree)


@pytest.mark.parametrize(
    ("draft", "tree", "words"),
    [
        ({}, {"steps": 8}, "graft.tree.steps is 8, but a block of the draft predicts 7 tokens"),
        ({"method": "dspark", "sample_from_anchor": False}, {"steps": 7},
         "graft.tree.steps is 7, but a block of the draft predicts 6 tokens (block_size)"),
        ({}, {"nodes": 40}, "num_speculative_tokens, the depth of a tree, is 31, but a block"),
        (_DFLASH2, {"topk": 17}, "but the draft has 16 candidates per position"),
        (_DFLASH2, {"head_dtype": "fp8"}, "head_dtype is 'fp8'|by their own output heads: set"),
        ({}, {"hot_tokens": 100}, "is 100, and|learning pays nothing: drop|, or give a file"),
        ({"method": "dspark"}, {"hot_tokens": "a.txt"},
         "is 'a.txt'|by themselves: drop --additional"),
        ({}, {"graph_runner": "eager"},
         "graft.tree.graph_runner is 'eager'|drop --additional-config"),
    ],
)  # fmt: skip
def test_what_block_drafters_lack_is_refused(
    config: Any, draft: dict[str, Any], tree: Tree, words: str
) -> None:
    _block(config, 31, **draft)
    _refusal(config, words, **tree)


@pytest.mark.parametrize(("method", "seqs", "most"), [("dflash", 256, 255), ("dspark", 293, 292)])
def test_more_rows_of_a_block_than_a_batch_has_are_refused(
    config: Any, method: str, seqs: int, most: int
) -> None:
    """The last token of DFlash's predicts nothing, so that its blocks are a row longer."""
    _block(config, 31, method)
    scheduler = config.scheduler_config
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2047, seqs
    words = f"The pass of the draft has|set --max-num-seqs to {most} or less"
    _refusal(config, words, steps=7)


@pytest.mark.parametrize(
    ("draft", "tree", "words"),
    [
        ({}, {"steps": 16}, "graft.tree.steps is 16, but a block of the draft predicts 15 tokens"),
        ({"xpress_block_size": 6}, {"steps": 6}, "is 6, but a block of the draft predicts 5"),
        ({"num_speculative_steps": 4}, {"steps": 6}, "is 6, but a block of the draft predicts 4"),
        ({"xpress_topc": 6}, {"topk": 7}, "draft has 6 candidates per position (xpress_topc)"),
        ({}, {"hot_tokens": "a.txt"}, "is 'a.txt'|by themselves: drop --additional"),
        # Its passes are over whole blocks, however deep the trees are.
        ({}, {"steps": 3}, "The pass of the draft has 2048 rows (--max-num-seqs 128 times 16"),
    ],
)
def test_what_xpress_drafts_lack_is_refused(
    config: Any, draft: dict[str, Any], tree: Tree, words: str
) -> None:
    _xpress(config, 31, **draft)
    scheduler = config.scheduler_config
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2047, 128
    _refusal(config, words, **tree)


def _latents(config: Any, **more: Any) -> None:
    draft = config.speculative_config.draft_model_config
    draft.use_mla, draft.hf_text_config = True, SimpleNamespace(kv_lora_rank=512, **more)


@pytest.mark.parametrize("topk", [1, 8])
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_of_drafts_with_latents_sparse_ones_are_refused(
    config: Any, method: str, topk: int
) -> None:
    """A chain is drafted by the same levels as a tree."""
    speculative = config.speculative_config
    speculative.method, speculative.num_speculative_tokens = method, 3
    _latents(config)
    _serve(config, topk=topk, steps=3)
    _latents(config, index_topk=2048)
    words = "The draft uses sparse attention. An indexer picks the keys of a row"
    words += f"|where a tree's are not: drop {KEY} for vLLM's"
    _refusal(config, words, topk=topk, steps=3)


def test_a_sparse_target_gets_a_chain_of_a_draft_with_latents(config: Any) -> None:
    config.model_config.use_mla = True
    config.model_config.hf_text_config.index_topk = 2048
    _latents(config)
    _refusal(config, "The target uses sparse attention", fallback="refuse")
    _serve(config, topk=1, steps=31)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("dflash", ". Nobody has tried"),
        ("dspark", ". Nobody has tried"),
        ("draft_model", "|for chains too: use another draft"),
    ],
)
def test_other_drafts_with_latents_are_refused(config: Any, method: str, words: str) -> None:
    if method == "draft_model":
        config.speculative_config.method = method
    else:
        _block(config, 31, method)
    config.speculative_config.draft_model_config.use_mla = True
    _refusal(config, f"MLA attention, and speculative_config.method is '{method}'{words}")


@pytest.fixture
def hot_file(tmp_path: Path) -> str:
    file = tmp_path / "hot.json"
    file.write_text(json.dumps(list(range(16))))
    return str(file)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_hot_tokens_are_for_every_head(config: Any, method: str, hot_file: str) -> None:
    config.speculative_config.method = method
    for hot_tokens in (hot_file, 512):
        _serve(config, hot_tokens=hot_tokens)


@pytest.mark.parametrize(
    ("draft", "method", "words"),
    [
        ({"use_mla": True}, "eagle3", "graft.tree.draft_window is 64, but the draft uses MLA"),
        ({"sliding_window": 128}, "mtp", f"window of 128 already|drop {KEY}.draft_w"),
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}, "eagle",
         "have a sliding window of 128 already"),
        ({}, "draft_model", "is 64, but speculative_config.method is 'draft_model'"),
        ({}, "ngram", "is 64, but speculative_config.method is 'ngram'"),
    ],
)  # fmt: skip
def test_windows_of_other_drafts_are_refused(
    config: Any, draft: dict[str, Any], method: str, words: str
) -> None:
    speculative = config.speculative_config
    speculative.method = method
    speculative.draft_model_config.use_mla = draft.get("use_mla", False)
    speculative.draft_model_config.hf_text_config = SimpleNamespace(**draft)
    _refusal(config, words, draft_window=64)


def test_a_file_of_hot_tokens_may_be_below_the_home_directory(
    config: Any, hot_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(Path(hot_file).parent))
    _serve(config, hot_tokens="~/hot.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't read"),
        ("[1, 2", "can't read"),
        ("[1, 1000]", "holds ids from 1 to 1000, but the target's vocabulary has ids 0 to 999"),
        ("[1, 2, 3]", f"lists 3 tokens, fewer than {KEY}.topk 8"),
    ],
)
def test_a_wrong_file_of_hot_tokens_is_refused(
    config: Any, hot_file: str, content: str | None, words: str
) -> None:
    Path(hot_file).unlink() if content is None else Path(hot_file).write_text(content)
    [_, line] = _refusal(config, words, hot_file, hot_tokens=hot_file).splitlines()
    assert line.startswith(f"  {KEY}.hot_tokens: ")


@pytest.mark.parametrize(("size", "draft_vocab"), [(7, None), (1000, None), (64, 64)])
def test_a_wrong_number_of_hot_tokens_is_refused(
    config: Any, size: int, draft_vocab: int | None
) -> None:
    config.speculative_config.draft_model_config.hf_config.draft_vocab_size = draft_vocab
    words = f"graft.tree.hot_tokens is {size}, but must be at least"
    _refusal(config, words, f"vocabulary of {draft_vocab or 1000} tokens", hot_tokens=size)


HOPPER, ROCM = platform(), platform("cuda", (9, 4), nvidia=False)


def test_an_fp8_head_needs_a_device_that_multiplies_them(
    config: Any, on: Callable[..., None]
) -> None:
    for capability in ((8, 9), (9, 0), (12, 0), None):
        on(platform("cuda", capability))
        _serve(config, head_dtype="fp8")
    on(platform("cpu"))
    _serve(config, head_dtype="fp8")
    on(platform("cuda", (8, 6)))
    words = "has capability 8.6. FP8 products need an NVIDIA GPU of compute capability 8.9"
    words += f"|graft.tree.head_dtype is 'fp8'|set {KEY}.head_dtype to 'auto'"
    _refusal(config, words, head_dtype="fp8")
    _serve(config)
    on(ROCM)
    words = "head_dtype is 'fp8', and this device is not NVIDIA's. FP8 products need"
    _refusal(config, words, head_dtype="fp8")


@pytest.mark.parametrize(
    ("current", "options", "words"),
    [
        (platform("cpu"), {}, "the platform cpu has no FlashAttention 3"),
        (ROCM, {}, "the platform cuda has no FlashAttention 3"),
        (platform("cuda", (8, 0)), {}, "for compute capability 9, and this device has 8.0"),
        (platform("cuda", (10, 0)), {}, "for compute capability 9, and this device has 10.0"),
        (HOPPER, {"flash_attn_version": 2}, "flash_attn_version is 2, not 3"),
        (HOPPER, {"backend": SimpleNamespace(name="TRITON_ATTN")},
         "the attention backend is TRITON_ATTN, not FLASH_ATTN"),
    ],
)  # fmt: skip
def test_flash_is_refused_where_there_is_none(
    config: Any, on: Callable[..., None], current: Any, options: dict[str, Any], words: str
) -> None:
    on(current)
    vars(config.attention_config).update(options)
    _refusal(config, "graft.tree.attention is 'flash', but |" + words, attention="flash")
    _serve(config, attention="auto")


def _backend(config: Any, name: str) -> None:
    config.attention_config.backend = SimpleNamespace(name=name)


def test_mla_is_served_by_backends_of_latents(config: Any, on: Callable[..., None]) -> None:
    config.model_config.use_mla = True
    _serve(config)
    for backend in ("TRITON_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "CPU_MLA", "TRITON_ATTN"):
        _backend(config, backend)
        _serve(config)
    _backend(config, "CUTLASS_MLA")
    _refusal(config, "CUTLASS_MLA, but trees on MLA need one of TRITON_MLA, ")
    # Without MLA they are none that trees have.
    config.model_config.use_mla = False
    _backend(config, "TRITON_MLA")
    _refusal(config, "TRITON_MLA, but trees need one of FLASH_ATTN, ")


def test_flash_is_refused_for_latents_in_fp8(config: Any, on: Callable[..., None]) -> None:
    on(HOPPER)
    config.model_config.use_mla = True
    for name in ("FLASH_ATTN_MLA", "FLASHMLA"):
        _backend(config, name)
        _serve(config, attention="flash")
    config.cache_config.cache_dtype = "fp8_e4m3"
    words = "graft.tree.attention is 'flash', but K/V of MLA is in fp8_e4m3"
    _refusal(config, words, attention="flash")


def test_flash_is_served_on_hopper(config: Any, on: Callable[..., None]) -> None:
    on(HOPPER)
    _serve(config, attention="flash")
    _backend(config, "FLASH_ATTN")
    _serve(config, attention="flash")
    on(HOPPER, batch_invariant=True)
    _refusal(config, "VLLM_BATCH_INVARIANT is set", attention="flash")


def test_drafts_have_no_chunks(config: Any) -> None:
    text = SimpleNamespace(attention_chunk_size=64)
    config.speculative_config.draft_model_config.hf_text_config = text
    words = "The draft has chunked-attention layers (chunk 64)"
    _refusal(config, f"{words}. Rows of a level|drop {KEY} for vLLM's own chain")
    text.layer_types = ["full_attention"] * 2
    _serve(config)
    text.layer_types = ["full_attention", "sliding_attention", "chunked_attention"]
    _refusal(config, words)
