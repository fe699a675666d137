"""What becomes of a tree for a target on which no tree can be verified."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.base import log
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.presets.node_count import fall_back
from vllm_graft.spec_decode.targets.recurrent import recurrent_features
from vllm_graft.spec_decode.tree_part import drafts_stock, leave_declined


def engine(tokens: int, section: dict[str, Any], ranges: Any = None, **model: Any) -> Any:
    text = SimpleNamespace()
    usual = dict.fromkeys(
        ("is_hybrid", "is_attention_free", "use_mla", "is_encoder_decoder", "uses_alibi"), False
    )
    target = SimpleNamespace(hf_text_config=text, **{**usual, **model})
    return SimpleNamespace(
        additional_config={"graft": {"tree": section}},
        model_config=target,
        speculative_config=SimpleNamespace(
            num_speculative_tokens=tokens,
            num_speculative_tokens_per_batch_size=ranges,
            target_model_config=None,
        ),
    )


def section(config: Any) -> TreeConfig:
    found = TreeConfig.from_vllm(config)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("tokens", "given", "depth"),
    [
        (31, {"topk": 8, "steps": 6}, 6),
        (3, {"steps": 6}, 3),
        (5, {"nodes": 63, "shape": "auto"}, 5),
    ],
)
def test_a_tree_becomes_a_chain_of_its_depth(
    tokens: int, given: dict[str, Any], depth: int
) -> None:
    config = engine(tokens, given, [(1, 4, tokens), (5, 9, 1)], uses_alibi=True)
    for _ in range(2):  # vLLM calls it again for derived configurations.
        tree = fall_back(section(config), config)
        assert (tree.topk, tree.steps, tree.nodes) == (1, depth, None)
        assert section(config) == tree
        assert config.speculative_config.num_speculative_tokens == depth
        ranges = config.speculative_config.num_speculative_tokens_per_batch_size
        assert ranges == [(1, 4, depth), (5, 9, 1)]


@pytest.mark.parametrize(
    ("given", "model"),
    [
        ({"fallback": "refuse"}, {"uses_alibi": True}),
        ({"topk": 1}, {"uses_alibi": True}),
        ({}, {}),
        ({}, {"use_mla": True}),
        # Nothing of ours serves these, and a chain is not tried.
        ({}, {"is_encoder_decoder": True}),
        ({}, {"is_encoder_decoder": True, "uses_alibi": True}),
    ],
)
def test_other_trees_stay(given: dict[str, Any], model: dict[str, bool]) -> None:
    config = engine(6, given, **model)
    assert fall_back(section(config), config) == TreeConfig(**given)
    assert config.additional_config == {"graft": {"tree": given}}
    assert config.speculative_config.num_speculative_tokens == 6


def test_sparse_mla_gets_a_chain() -> None:
    config = engine(6, {}, use_mla=True)
    config.model_config.hf_text_config.index_topk = 2048
    assert fall_back(section(config), config).topk == 1


KNOWN = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "nemotron_h", "falcon_h1"]


@pytest.mark.parametrize("kind", [*KNOWN, "zamba2"])
@pytest.mark.parametrize("nvidia", [True, False])
def test_known_recurrent_layers_have_trees_on_nvidia_gpus(
    kind: str, nvidia: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recurrent_features, "_on_nvidia", lambda: nvidia)
    log.warning_once.cache_clear()
    config = engine(6, {"recurrent": True}, is_hybrid=True)
    config.model_config.hf_text_config.model_type = kind
    known = kind in KNOWN
    assert fall_back(section(config), config).topk == (8 if known and nvidia else 1)
    told = "whose trees need an NVIDIA GPU" if known else "has Mamba or linear-attention layers"
    assert (told in caplog.text) is not (known and nvidia)


@pytest.mark.parametrize("full_rank", [True, False])
def test_kimi_k3_s_layers_get_a_chain(full_rank: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its type is Kimi Linear's, and its gates tell it."""
    monkeypatch.setattr(recurrent_features, "_on_nvidia", lambda: True)
    config = engine(6, {"recurrent": True}, is_hybrid=True, use_mla=True)
    text = config.model_config.hf_text_config
    text.model_type = "kimi_linear"
    text.linear_attn_config = {"use_full_rank_gate": full_rank, "kda_layers": [1]}
    assert fall_back(section(config), config).topk == (1 if full_rank else 8)


@pytest.mark.parametrize("given", [{}, {"recurrent": None}])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_the_gated_delta_rule_gets_trees_unasked(
    kind: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent_features, "_on_nvidia", lambda: True)
    config = engine(6, given, is_hybrid=True)
    config.model_config.hf_text_config.model_type = kind
    assert fall_back(section(config), config).topk == 8


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("qwen3_next", {"recurrent": False}),
        ("qwen3_5_text", {"recurrent": False}),
        ("kimi_linear", {}),
        ("nemotron_h", {}),
        ("nemotron_h", {"recurrent": False}),
    ],
)
def test_recurrent_layers_get_a_chain_unasked(
    kind: str,
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(recurrent_features, "_on_nvidia", lambda: True)
    log.warning_once.cache_clear()
    config = engine(6, given, is_hybrid=True)
    config.model_config.hf_text_config.model_type = kind
    assert fall_back(section(config), config).topk == 1
    assert "are tried with --additional-config.graft.tree.recurrent true" in caplog.text
    assert "rejection_sample_method 'block': drop --additional-config.graft.tree" in caplog.text


def test_chunks_keep_their_trees() -> None:
    config = engine(6, {})
    config.model_config.hf_text_config.attention_chunk_size = 8192
    assert fall_back(section(config), config).topk == 8


def test_what_the_user_gave_is_left_alone() -> None:
    given = {"topk": 8}
    config = engine(6, given, is_hybrid=True)
    fall_back(section(config), config)
    assert given == {"topk": 8}


@pytest.mark.parametrize("declined", [[False, True], [False, False]])
@pytest.mark.parametrize("preset", [True, False])
def test_a_scheduler_learns_that_workers_have_declined_a_preset_s_trees(
    declined: list[bool], preset: bool
) -> None:
    """It asks for a chain, though buffers are sized for a tree."""
    config = engine(63, {"topk": 8, "steps": 5, "nodes": 63, "shape": "fixed"})
    config.scheduler_config = SimpleNamespace(max_num_seqs=16)
    if preset:
        decided = {"preset": "auto", "on": {"tree": ""}, "off": {}}
        config.additional_config["graft"]["decided"] = decided
    asked: list[Any] = []
    core = SimpleNamespace(collective_rpc=lambda ask: asked.append(ask) or declined)
    leave_declined(core, config)
    assert asked == [drafts_stock] * preset
    left = preset and any(declined)
    assert (TreeConfig.from_vllm(config) is None) is left
    speculative = config.speculative_config
    assert speculative.num_speculative_tokens == 63
    assert speculative.num_speculative_tokens_per_batch_size == ([(1, 16, 5)] if left else None)
    # In a process that has both, the worker was first.
    if left:
        leave_declined(core, config)
        assert len(asked) == 1
