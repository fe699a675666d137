"""A draft whose layers and output head are in FP8, on a device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.engines.gpu_engines import shipped_trees
from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.spec_decode.heads.fp8_head import FP8
from vllm_graft.testing import model_runner, spec_metrics

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    eagle = {"graph_runner": "verify", "head_dtype": "fp8"}
    with shipped_trees(eagle, quantization="fp8_per_channel") as built:
        yield built


def test_the_draft_is_in_fp8_and_the_target_is_not(llm: Any) -> None:
    draft = model_runner(llm).speculator
    layer = draft.model.model.layers[0]
    for each in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj, draft.head.fp8):
        assert each.weight.dtype == FP8
    assert draft.head.fp8.num_bytes == draft.report()["fp8_head_bytes"]
    assert all(weight.dtype == torch.bfloat16 for weight in model_runner(llm).model.parameters())


def test_states_are_combined_by_kernels(llm: Any) -> None:
    """The operations that vLLM would compile give nearly the same result."""
    draft = model_runner(llm).speculator.model
    fc = draft.model.fc
    quantization = fc.quant_method.fp8_linear.quant_fp8
    assert quantization._forward_method == quantization.forward_cuda
    states = torch.randn(24, fc.input_size, device="cuda", dtype=torch.bfloat16)
    found = draft.combine_hidden_states(states).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "_forward_method", quantization.forward_native)
        expected = draft.combine_hidden_states(states).float()
    assert float((found - expected).norm() / expected.norm()) < 0.01


def test_graphs_draft_what_launches_do(llm: Any) -> None:
    prompts = Pair.load(SHIPPED).prompts
    for temperature in (0.0, 0.8):
        for batch in (1, 3, 8):
            params = [
                SamplingParams(temperature=temperature, max_tokens=64, ignore_eos=True, seed=i)
                for i in range(batch)
            ]
            llm.generate(prompts[:batch], params, use_tqdm=False)
    report = model_runner(llm).speculator.report()
    assert sum(map(len, report["draft_graphs_verified"].values())) >= 2
    assert not any(report["draft_graphs_differing"].values())
    # In bf16 the acceptance length is about 2.9 at four levels.
    assert spec_metrics(llm).acceptance_length > 2.3


def test_the_head_ranks_as_the_loaded_one_nearly(llm: Any) -> None:
    draft = model_runner(llm).speculator
    hidden = torch.randn(64, draft.head.fp8.weight.shape[1], device="cuda", dtype=torch.bfloat16)
    exact = draft.model.logits_processor(draft.model.lm_head, hidden).float()
    found = draft.head.logits(hidden).float()
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.05
    best = exact.argmax(1, keepdim=True)
    among = (found.topk(4).indices == best).any(1).float().mean()
    assert float(among) > 0.9
