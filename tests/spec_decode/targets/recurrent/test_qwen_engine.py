"""Qwen3.5 as it is served: trees of its own module answer to texts and images as it does alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.engines.pairs import counter
from tests.support.engines.recorded_engine import recorded_engine
from tests.support.engines.recurrent_layers import interpreted
from tests.support.models.served_qwen import (
    IMAGE_SIDE,
    image_request,
    rows_at_their_slots,
    write_served_qwen3_5,
    write_text_qwen3_5,
)
from vllm_graft.plan.memory import memory_of
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import node_bytes
from vllm_graft.testing import cpu_engine, model_runner, spec_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

TEXTS: list[Any] = [
    {"prompt_token_ids": ids} for ids in ([7, 3, 9, 30, 2], list(range(100, 159)), [11])
]
"""The second one comes in chunks, and the last one is padded with placeholders for drafts."""

SIZES = [(64, 64), (96, 64)]
IMAGES = [
    image_request("What is it?", [(64, 96)]),
    image_request("And are these of one kind, or of two or three of them?", SIZES, seed=5),
]
"""The second one comes in chunks."""

TOKENS = 12
GREEDY: dict[str, Any] = {"temperature": 0.0}
BOTH: tuple[dict[str, Any], ...] = (GREEDY, {"seed": 7})


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with interpreted():
        yield


TREE = {"tree": {"topk": 2, "steps": 4}}


def options(graft: Any = None) -> dict[str, Any]:
    """Options of an engine in which prompts come while other requests are verified."""
    usual: dict[str, Any] = {
        "max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 48,
        "enable_prefix_caching": True, "block_size": 32,
    }  # fmt: skip
    if graft is not None:
        usual["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 7}
        usual["additional_config"] = {"graft": graft}
    return usual


def with_images() -> dict[str, Any]:
    return {"limit_mm_per_prompt": {"image": 2, "video": 0}, "mm_processor_cache_gb": 0}


def answers(
    llm: Any, requests: list[Any], kinds: tuple[dict[str, Any], ...] = BOTH
) -> list[list[int]]:
    """Tokens of all requests of the first kind, then of the second."""
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, **kind) for kind in kinds]
    given = [param for param in params for _ in requests]
    outputs = llm.generate(requests * len(kinds), given, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


class ImageRows:
    """Counts rows that a model's pass reads an image's embedding in."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        self._stock = model.embed_input_ids
        model.embed_input_ids = self

    def __call__(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_image = kwargs.get("is_multimodal")
        self.count += 0 if is_image is None else int(is_image.sum())
        found: torch.Tensor = self._stock(ids, *args, **kwargs)
        return found


def test_texts_and_images(tmp_path: Path) -> None:
    served = write_served_qwen3_5(tmp_path)
    with cpu_engine(served, **options(), **with_images()) as llm:
        texts, images = answers(llm, TEXTS), answers(llm, IMAGES)
        # Negative control: what is in an image decides the answer.
        other = [image_request("What is it?", [(64, 96)], seed=9)]
        assert answers(llm, other, (GREEDY,)) != images[:1]
    with cpu_engine(served, **options(TREE), **with_images()) as llm:
        runner = model_runner(llm)
        assert type(runner.model).__name__ == "Qwen3_5ForConditionalGeneration"
        assert type(runner.speculator).__name__ == "MtpTrees"
        assert runner.model_state.rope_state is not None
        # The module reads each image once, though it comes in chunks.
        read = ImageRows(runner.speculator.model)
        assert answers(llm, IMAGES[1:], (GREEDY,)) == images[1:2]
        assert read.count == sum(high * wide // IMAGE_SIDE**2 for high, wide in SIZES)
        assert counter(llm, "vllm:prefix_cache_hits") == 0
        found = answers(llm, TEXTS + IMAGES)
        assert found == [*texts[:3], *images[:2], *texts[3:], *images[2:]]
        assert counter(llm, "vllm:prefix_cache_hits") > 0
        assert runner.speculator.context.counters.mixed_launches
        assert spec_metrics(llm).acceptance_length > 1.5
        config = llm.llm_engine.vllm_config
        planned = {row.what: row.num_bytes for row in memory_of(config)[0]}
        assert planned["recurrent state of the target"] == 8 * node_bytes(7, config)
        # Negative control: positions of accepted nodes matter.
        with rows_at_their_slots():
            assert answers(llm, IMAGES, (GREEDY,)) != images[:2]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["served", "served experts", "text", "text experts"])
def test_other_classes_and_graphs(kind: str, tmp_path: Path) -> None:
    """Models with experts and text models alone answer so, too, and all do in FULL graphs."""
    is_served, experts = kind.startswith("served"), kind.endswith("experts")
    write = write_served_qwen3_5 if is_served else write_text_qwen3_5
    target, requests = write(tmp_path, experts=experts), TEXTS + IMAGES * is_served
    more = with_images() if is_served else {"skip_tokenizer_init": True}
    with cpu_engine(target, **options(), **more) as llm:
        alone = answers(llm, requests)
    with recorded_engine(target, **options(TREE), **more, graphs=[1, 2, 4, 8, 16]) as llm:
        assert answers(llm, requests) == alone
        runner = model_runner(llm)
        assert type(runner.model).__name__.startswith("Qwen3_5Moe" if experts else "Qwen3_5For")
        assert (runner.model_state.rope_state is not None) is is_served
        assert runner.speculator.context.counters.tree_replays
        assert spec_metrics(llm).acceptance_length > 1.5
