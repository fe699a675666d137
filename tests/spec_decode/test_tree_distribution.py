"""Without seeds the tokens are drawn from the target's distribution: chi-square tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

VOCAB = 12
PLACES = 3
PROMPTS = [[3, 5, 7, 2], [9, 4, 4, 8, 6]]
COUNT = 400
# 99.99 % quantile of chi-square with 11 degrees of freedom a prompt.
LIMIT = {1: 37.4, 2: 56.0}[len(PROMPTS)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_graft.testing import TinyShape, write_eagle3, write_llama

    folder = tmp_path_factory.mktemp("small_vocabulary")
    shape = TinyShape(vocab_size=VOCAB, num_layers=4, init_std=0.08)
    write_eagle3(folder / "draft", shape)
    return write_llama(folder / "target", shape)


def draw(target: Path) -> tuple[torch.Tensor, float]:
    """Tokens `[prompts, COUNT, PLACES]` that the engine draws, and its acceptance length."""
    from vllm import SamplingParams

    from vllm_graft.testing import cpu_engine, spec_metrics

    draft = str(target.parent / "draft")
    with cpu_engine(
        target,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        skip_tokenizer_init=True,
        speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 4},
        additional_config={"graft": {"eagle": {"topk": 3, "steps": 2}}},
    ) as llm:
        params = SamplingParams(n=COUNT, max_tokens=PLACES, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [[answer.token_ids for answer in output.outputs] for output in outputs]
        return torch.tensor(tokens), spec_metrics(llm).acceptance_length


def statistic(observed: torch.Tensor, wanted: torch.Tensor) -> float:
    """Pearson's chi-square; both `[prompts, VOCAB]`, in counts."""
    return float(((observed - wanted) ** 2 / wanted).sum())


def test_distribution_is_the_target_s(target: Path) -> None:
    drawn, acceptance_length = draw(target)
    assert acceptance_length > 1.2
    truths = torch.stack([marginals(target, prompt) for prompt in PROMPTS], 1)
    for place, truth in enumerate(truths):
        tokens = drawn[:, :, place]
        observed = torch.stack([torch.bincount(row, minlength=VOCAB) for row in tokens]).double()
        wanted = truth * COUNT
        assert float(wanted.min()) > 4, "too few samples for a chi-square test"
        found = statistic(observed, wanted)
        assert found < LIMIT, f"token {place}: chi-square {found:.1f}"
        # The test can fail: a distribution sharpened as by temperature 0.6 is refused.
        sharp = truth ** (1 / 0.6)
        assert statistic(observed, sharp / sharp.sum(-1, keepdim=True) * COUNT) > LIMIT


def marginals(target: Path, prompt: list[int]) -> torch.Tensor:
    """Exact distributions `[PLACES, VOCAB]` of the next tokens, summed over all before them."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(target).double().eval()
    prefixes, weights = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    found = []
    for _ in range(PLACES):
        with torch.no_grad():
            step = model(prefixes).logits[:, -1].softmax(-1)
        joint = weights[:, None] * step
        found.append(joint.sum(0))
        tokens = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, 0), tokens], 1)
        weights = joint.flatten()
    return torch.stack(found)
