"""Each combination that a tree cannot serve: refused, with what to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.checks import validate
from vllm_graft.config import GraftConfig
from vllm_graft.errors import ConfigError


def _set(config: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    assert hasattr(config, name) or "hf_text_config" in path, f"{path} is not in the stand-in"
    setattr(config, name, value)


def _refusal(config: Any, **eagle: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(GraftConfig.parse({"eagle": eagle}), config)
    return str(caught.value)


CASES = [
    ("speculative_config", None, "add --speculative-config"),
    ("speculative_config.method", "ngram", "'ngram': set it to 'eagle' or 'eagle3'"),
    ("speculative_config.num_speculative_tokens", 64, "got 64: set it to 1..63"),
    ("speculative_config.num_speculative_tokens", 0, "got 0: set it to 1..63"),
    ("speculative_config.draft_sample_method", "probabilistic", "draft_sample_method"),
    ("speculative_config.rejection_sample_method", "block", "set it to 'standard'"),
    ("speculative_config.rejection_sample_method", "synthetic", "set it to 'standard'"),
    ("speculative_config.use_local_argmax_reduction", True, "use_local_argmax_reduction"),
    ("speculative_config.parallel_drafting", True, "parallel_drafting"),
    ("speculative_config.enable_adaptive_verification", True, "enable_adaptive_verification"),
    ("use_v2_model_runner", False, "unset VLLM_USE_V2_MODEL_RUNNER"),
    (
        "compilation_config.cudagraph_mode",
        SimpleNamespace(name="FULL"),
        "FULL_AND_PIECEWISE, FULL_DECODE_ONLY, PIECEWISE or NONE",
    ),
    ("parallel_config.pipeline_parallel_size", 2, "--pipeline-parallel-size is 2: set it to 1"),
    ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size is 2"),
    ("parallel_config.prefill_context_parallel_size", 4, "--prefill-context-parallel-size is 4"),
    ("parallel_config.use_ubatching", True, "drop --enable-dbo and --ubatch-size"),
    ("parallel_config.enable_batch_sharded_sampling", True, "--enable-batch-sharded-sampling"),
    ("model_config.is_hybrid", True, "Mamba"),
    ("model_config.is_attention_free", True, "Mamba"),
    ("model_config.use_mla", True, "MLA"),
    ("model_config.is_encoder_decoder", True, "encoder-decoder"),
    ("model_config.uses_alibi", True, "ALiBi"),
    ("model_config.hf_text_config.sliding_window", 4096, "--disable-sliding-window"),
    ("model_config.hf_text_config.interleaved_sliding_window", 512, "window 512"),
    ("model_config.hf_text_config.attention_chunk_size", 8192, "chunk 8192"),
    ("model_config.hf_text_config.num_kv_shared_layers", 10, "shares K/V"),
    ("model_config.return_sampling_mask", True, "--return-sampling-mask"),
    ("model_config.enable_trace_replay", True, "--enable-trace-replay"),
    ("model_config.logits_processors", ["mine:Processor"], "--logits-processors"),
    ("scheduler_config.max_num_seqs", 257, "has 2056 rows (--max-num-seqs 257 times"),
    ("scheduler_config.max_num_batched_tokens", 2047, "set --max-num-seqs to 255 or less"),
    ("watermark_config", object(), "--watermark-config"),
    ("kv_transfer_config", SimpleNamespace(kv_connector="Other"), "--kv-transfer-config"),
]


@pytest.mark.parametrize(("path", "value", "words"), CASES)
def test_refused(vllm_config: Any, path: str, value: Any, words: str) -> None:
    _set(vllm_config, path, value)
    message = _refusal(vllm_config)
    assert words in message
    assert message.startswith("--additional-config.graft.eagle asks for tree drafts")
    assert len(message.splitlines()) == 2


def test_the_stand_in_itself_is_served(vllm_config: Any) -> None:
    validate(GraftConfig.parse({"eagle": {}}), vllm_config)


@pytest.mark.parametrize(("path", "value", "words"), CASES)
def test_nothing_is_refused_without_eagle(
    vllm_config: Any, path: str, value: Any, words: str
) -> None:
    _set(vllm_config, path, value)
    validate(GraftConfig(), vllm_config)


def test_every_problem_is_named_at_once(vllm_config: Any) -> None:
    vllm_config.parallel_config.pipeline_parallel_size = 2
    vllm_config.model_config.use_mla = True
    assert len(_refusal(vllm_config).splitlines()) == 3


@pytest.mark.parametrize(("topk", "steps", "most"), [(1, 5, 5), (2, 3, 10), (3, 1, 3)])
def test_more_nodes_than_the_tree_holds(vllm_config: Any, topk: int, steps: int, most: int) -> None:
    vllm_config.speculative_config.num_speculative_tokens = most
    validate(GraftConfig.parse({"eagle": {"topk": topk, "steps": steps}}), vllm_config)
    vllm_config.speculative_config.num_speculative_tokens = most + 1
    message = _refusal(vllm_config, topk=topk, steps=steps)
    assert f"holds {most} nodes" in message
    assert "--additional-config.graft.eagle.topk" in message


def test_the_draft_s_levels_have_to_fit(vllm_config: Any) -> None:
    vllm_config.scheduler_config.max_num_seqs = 300
    message = _refusal(vllm_config, topk=10)
    assert "--additional-config.graft.eagle.topk 10" in message
    assert "--max-num-seqs to 204 or less, or --max-num-batched-tokens to 3000 or more" in message
    vllm_config.scheduler_config.max_num_batched_tokens = 3000
    validate(GraftConfig.parse({"eagle": {"topk": 10}}), vllm_config)


def test_more_steps_than_nodes_is_fine(vllm_config: Any) -> None:
    vllm_config.speculative_config.num_speculative_tokens = 2
    validate(GraftConfig.parse({"eagle": {"steps": 32}}), vllm_config)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_other_graph_modes_are_fine(vllm_config: Any, mode: str) -> None:
    vllm_config.compilation_config.cudagraph_mode.name = mode
    validate(GraftConfig.parse({"eagle": {}}), vllm_config)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("hot_tokens", ["hot.json", 512])
def test_hot_tokens_are_for_every_head(
    vllm_config: Any, method: str, hot_tokens: str | int
) -> None:
    vllm_config.speculative_config.method = method
    validate(GraftConfig.parse({"eagle": {"hot_tokens": hot_tokens}}), vllm_config)


@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_a_window_that_no_layer_uses_is_fine(vllm_config: Any, name: str) -> None:
    text = vllm_config.model_config.hf_text_config
    setattr(text, name, 1024)
    text.layer_types = ["full_attention"] * 2
    validate(GraftConfig.parse({"eagle": {}}), vllm_config)
    text.layer_types = ["full_attention", "sliding_attention", "chunked_attention"]
    assert "layers" in _refusal(vllm_config)


def test_a_derived_draft_configuration_is_judged_by_its_target(vllm_config: Any) -> None:
    # vLLM runs the check again for configurations whose model_config is the draft's.
    vllm_config.model_config = SimpleNamespace(is_hybrid=True)
    validate(GraftConfig.parse({"eagle": {}}), vllm_config)


def test_our_connector_is_served_beside_trees(vllm_config: Any) -> None:
    transfer = SimpleNamespace(kv_connector="HiCacheConnector")
    _set(vllm_config, "kv_transfer_config", transfer)
    validate(GraftConfig.parse({"eagle": {}}), vllm_config)
