"""Real engines with tiny models generate the same text with and without vision graphs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.answers.dashboard import without_data
from tests.support.answers.metrics_page import metrics_page
from tests.support.vision import towers, vision_models
from vllm_graft.base.errors import ConfigError
from vllm_graft.metrics.server_info import total
from vllm_graft.testing import cpu_engine, model_runner

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SIZES = [(64, 96), (96, 64), (64, 64), (64, 96), (128, 128), (64, 96)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vision")
    return {
        "qwen3_vl": vision_models.write_qwen3_vl(folder / "qwen3_vl"),
        "llava": vision_models.write_llava(folder / "llava"),
    }


@contextlib.contextmanager
def engine(folder: Path, vit: dict[str, Any] | None) -> Iterator[Any]:
    from vllm.model_executor.models import qwen3_vl
    from vllm.platforms.cpu import CpuPlatform

    graphs = classmethod(lambda cls: True)
    options: dict[str, Any] = {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "NONE"},
        "limit_mm_per_prompt": {"image": 2} if "llava" in str(folder) else {"image": 2, "video": 0},
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
        "mm_processor_cache_gb": 0,
        "enable_prefix_caching": False,
        "additional_config": {} if vit is None else {"graft": {"vit": vit}},
    }
    with (
        mock.patch.object(CpuPlatform, "support_static_graph_mode", graphs),
        mock.patch.object(qwen3_vl, "HAS_TRITON", False),
        towers.fake_backend(),
        cpu_engine(folder, **options) as llm,
    ):
        yield llm


def answers(llm: Any, prompt: str) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found: list[list[int]] = []
    for seed, size in enumerate(SIZES):
        image = vision_models.noise_image(*size, seed=seed)
        request: Any = {"prompt": prompt, "multi_modal_data": {"image": image}}
        [output] = llm.generate([request], params, use_tqdm=False)
        found.append(list(output.outputs[0].token_ids))
    return found


@pytest.mark.parametrize(
    ("name", "prompt", "tiers"),
    [
        ("qwen3_vl", vision_models.QWEN_PROMPT, {"exact", "bucket", "eager"}),
        ("llava", vision_models.LLAVA_PROMPT, {"exact"}),
    ],
)
def test_text_is_that_of_the_eager_encoder(
    checkpoints: dict[str, Path], name: str, prompt: str, tiers: set[str]
) -> None:
    with engine(checkpoints[name], None) as llm:
        assert model_runner(llm).model_state.encoder_runner.cudagraph_manager is None
        expected = answers(llm, prompt)
    assert len({tuple(tokens) for tokens in expected}) > 1
    with engine(checkpoints[name], {"max_patches": 256, "capture_share": 1}) as llm:
        manager = model_runner(llm).model_state.encoder_runner.cudagraph_manager
        manager.capture(graph_pool=None)
        assert answers(llm, prompt) == expected
        (report,) = llm.collective_rpc("graft_info")
        counters = report["counters"]["vit"]
        page = metrics_page()
        del manager
    assert report["parts"] == ["vit"]
    assert report["seams"] == {}
    assert set(counters["items"]) == tiers
    assert sum(counters["items"].values()) == len(SIZES)
    assert counters["failures"] == []
    # The page of metrics says the same, and all that the dashboard shows.
    assert without_data(page, "", "vit") == []
    for tier in ("exact", "bucket", "fused", "eager"):
        told = total(page, "vllm:graft_vit_items_total", tier=tier)
        assert told == counters["items"].get(tier, 0)
    assert total(page, "vllm:graft_vit_memory_bytes") == counters["bytes"] > 0
    assert total(page, "vllm:graft_info", part="vit", state="on") == 1


def test_a_text_model_is_refused(tmp_path: Path) -> None:
    from vllm_graft.testing import write_llama

    refused = pytest.raises(ConfigError, match=r"graft\.vit.*\n.*text only")
    with refused, engine(write_llama(tmp_path / "llama"), {}):
        pass
