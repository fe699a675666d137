"""Tokens without seeds are drawn from the target's distribution: chi-square tests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from vllm_graft.testing import TinyShape, cpu_engine, spec_metrics, write_eagle3, write_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

VOCAB = 8
PLACES = 3
PROMPT = [3, 5, 7, 2]
COUNT = 256
# This is the 99.99 % quantile of chi-square with 7 degrees of freedom.
LIMIT = 29.9


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small_vocabulary")
    shape = TinyShape(vocab_size=VOCAB, num_layers=4, init_std=0.1)
    write_eagle3(folder / "draft", shape)
    # A temperature of 0.6 changes the distributions of this seed most, among a few seeds.
    return write_llama(folder / "target", shape, seed=2)


def draw(target: Path) -> tuple[torch.Tensor, float]:
    """Have the engine draw tokens `[COUNT, PLACES]`; return them and its acceptance length."""
    draft = str(target.parent / "draft")
    with cpu_engine(
        target,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        skip_tokenizer_init=True,
        speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 3},
        additional_config={"graft": {"tree": {"topk": 2, "steps": 2}}},
    ) as llm:
        params = SamplingParams(n=COUNT, max_tokens=PLACES, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        tokens = torch.tensor([answer.token_ids for answer in output.outputs])
        return tokens, spec_metrics(llm).acceptance_length


def statistic(observed: torch.Tensor, wanted: torch.Tensor) -> float:
    """Compute Pearson's chi-square; both arguments are counts `[VOCAB]`."""
    return float(((observed - wanted) ** 2 / wanted).sum())


def test_distribution_is_the_target_s(target: Path) -> None:
    drawn, acceptance_length = draw(target)
    assert acceptance_length > 1.2
    for place, truth in enumerate(marginals(target)):
        observed = torch.bincount(drawn[:, place], minlength=VOCAB).double()
        wanted = truth * COUNT
        assert float(wanted.min()) > 4, "too few samples for a chi-square test"
        found = statistic(observed, wanted)
        assert found < LIMIT, f"token {place}: chi-square {found:.1f}"
        # Negative control: a distribution sharpened as by temperature 0.6 is refused.
        sharp = truth ** (1 / 0.6)
        assert statistic(observed, sharp / sharp.sum() * COUNT) > LIMIT


def marginals(target: Path) -> torch.Tensor:
    """Compute exact distributions `[PLACES, VOCAB]` of next tokens, summed over earlier ones."""
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(target).double().eval()
    prefixes, weights = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
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
