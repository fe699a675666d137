"""EAGLE-1 heads of the real pair: scales, training, files, and what vLLM makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_pair import making, training
from benchmarks.real_pair.answers import draw, generate, grown
from benchmarks.real_pair.descent import Run
from benchmarks.real_pair.feature_head import (
    FeatureHead,
    LeastSquares,
    Scales,
    load_feature_head,
    save_feature_head,
    stored_weights,
)
from benchmarks.real_pair.head import HeadSizes
from benchmarks.real_pair.targets import TARGETS
from benchmarks.real_pair.texts import Text
from tests.support.engines.shipped_pair import SHIPPED

CPU = torch.device("cpu")


def small_head(scales: Scales) -> FeatureHead:
    """A random head of a Gemma in small, whose layers have two rates of rotation."""
    config: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
        "vocab_size": 50, "max_position_embeddings": 128,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip
    torch.manual_seed(0)
    return FeatureHead(HeadSizes.of(config, 50), torch.randn(50, 32), scales)


def test_stored_weights_read_states_as_the_target_makes_them(tmp_path: Path) -> None:
    """What is divided in training is in the weights of a stored head."""
    head = small_head(Scales(5.0, 0.04))
    head.layers[0].post_attention_layernorm.weight.data.uniform_(0.5, 1.5)
    aux, embeds = 5 * torch.randn(2, 9, 32), 0.04 * torch.randn(2, 9, 32)
    plain = FeatureHead(head.sizes, head.outputs)
    plain.load_state_dict(stored_weights(head))
    save_feature_head(head, tmp_path)
    loaded = load_feature_head(tmp_path, head.outputs)
    with torch.no_grad():
        for wanted, exact, rounded in zip(
            *(each(aux, embeds, 3) for each in (head, plain, loaded)), strict=True
        ):
            torch.testing.assert_close(exact, wanted, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(rounded, wanted, rtol=0.1, atol=0.3)
            # Negative control: what comes out depends on both inputs.
        other = plain(aux, embeds.flip(0), 3)[0]
    assert (other - head(aux, embeds, 3)[0]).abs().max() > 1
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["EagleLlamaForCausalLM"]
    assert config["rope_parameters"]["rope_theta"] == 1e6
    assert not {"draft_vocab_size", "eagle_aux_hidden_state_layer_ids"} & set(config)


def test_a_head_begins_by_least_squares() -> None:
    """A linear target is drafted without training, but not by a head that began elsewhere."""
    head = small_head(Scales(5.0, 0.04))
    aux, embeds = 5 * torch.randn(1, 400, 32), 0.04 * torch.randn(1, 400, 32)
    mixed = torch.randn(32, 64) / 8
    states = 5 * torch.cat((embeds / 0.04, aux / 5), -1) @ mixed.mT
    sums = LeastSquares(32, head.scales)
    sums.add(aux[0], embeds[0], states[0])

    def missed() -> float:
        with torch.no_grad():
            return float(head.distance(head(aux, embeds, 1)[0], states))

    before = missed()
    head.begin(sums.solve(1e-4))
    assert missed() < 0.05 * before


def test_limited_lessons_come_again(target: Any) -> None:
    texts = [Text(torch.arange(5 * i, 5 * i + 20, dtype=torch.int32), 4) for i in range(12)]
    teacher = training.Teacher(target, torch.arange(50), (), whole=False)
    run = Run(CPU, 1000, tokens=64, longest=20, passes=2, reading=1e-9)
    first, second = islice(training.lessons(teacher, texts, run), 2)
    assert first is second
    rows = first.rows.sum().item()
    assert first.states.shape == (rows, target.config.hidden_size)
    # The token that was likeliest among these is what the probabilities say.
    assert torch.equal(first.wanted.argmax(-1), first.best)
    unlimited = islice(training.lessons(teacher, texts, replace(run, reading=0)), 2)
    assert len({id(each) for each in unlimited}) == 2


def test_a_head_learns_of_other_tokens_too() -> None:
    ids = torch.tensor([3, 5, 8, 13])
    found = making.with_others(ids, 100)
    assert len(set(found.tolist())) == 6
    assert set(ids.tolist()) < set(found.tolist())
    assert found.tolist() == sorted(found.tolist())


def test_drawn_tokens_follow_the_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0, 2.0]]).repeat(400, 1)
    random = torch.Generator().manual_seed(0)
    assert set(draw(logits, torch.zeros(400), random).tolist()) == {2}
    warm = torch.bincount(draw(logits, torch.full((400,), 2.0), random), minlength=4) / 400
    torch.testing.assert_close(warm, (logits[0] / 2).softmax(-1), rtol=0, atol=0.07)


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(str(SHIPPED / "target"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(str(SHIPPED / "target"))
    prompts = json.loads((SHIPPED / "prompts.json").read_text())[:24]
    return [tokenizer(each)["input_ids"][: 10 + i % 5] for i, each in enumerate(prompts)]


def test_prompts_of_several_lengths_grow_as_alone(target: Any, asked: list[list[int]]) -> None:
    random = torch.Generator().manual_seed(0)
    together = grown(target, asked[:5], [0.0] * 5, 8, random)
    for prompt, row in zip(asked[:5], together, strict=True):
        alone = target.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        assert row == alone[0, len(prompt) :].tolist()


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_vllm_accepts_what_a_trained_head_foretells(
    tmp_path: Path, target: Any, asked: list[list[int]]
) -> None:
    from vllm import SamplingParams

    from tests.support.engines.pairs import Pair
    from vllm_graft.testing import spec_metrics

    turns = [(prompt, 0.0) for prompt in asked]
    texts = generate(target, turns, seconds=1000, max_tokens=40, held_out=False)
    config = json.loads((SHIPPED / "target" / "config.json").read_text())
    ids, _ = training.frequent_tokens(texts, config["vocab_size"], 300)
    run = Run(CPU, 1000, 60, tokens=512, longest=56, passes=3, rate=3e-3)
    torch.manual_seed(0)
    made = making.maker(TARGETS["gemma3-270m"])(config, target, ids)
    losses = made.train(texts, run)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
    made.save(tmp_path)
    judge, run = made.judge(run)
    foretold = training.acceptance(made.head, judge, texts[:16], run)
    assert foretold.length > 1.5
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in asked[:16]]
    pair = Pair(str(SHIPPED / "target"), str(tmp_path / "eagle"), [])
    with pair.engine(chain=3, method="eagle", dtype="float32", disable_log_stats=False) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        found = spec_metrics(llm).acceptance_length
    assert found == pytest.approx(foretold.length, rel=0.15), foretold
