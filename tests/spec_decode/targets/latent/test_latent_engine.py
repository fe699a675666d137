"""Targets with MLA: trees answer as the target alone does."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.answers.near_ties import answers, check_near_ties, departures
from tests.support.engines.latent_engines import PROMPTS as LONG_PROMPTS
from tests.support.engines.latent_engines import TOKENS as LONG_TOKENS
from tests.support.engines.latent_engines import latent_engine, near
from tests.support.engines.recorded_engine import recorded_engine
from tests.support.models import table_drafter
from tests.support.models.latent_models import draft_shape, write_deepseek
from vllm_graft.spec_decode.targets.dense.two_pass import Passes, Point
from vllm_graft.spec_decode.targets.families import UnchangedState
from vllm_graft.spec_decode.targets.latent.latent_layer import LatentFamily, TreeLatents
from vllm_graft.spec_decode.targets.latent.own_latents import attend_own_latents
from vllm_graft.spec_decode.trees.batch import LatentBatch
from vllm_graft.spec_decode.tuning import attention_timing
from vllm_graft.testing import cpu_engine, greedy, model_runner, spec_metrics, write_eagle3

pytestmark = pytest.mark.engine

PROMPTS = [[7, 3, 9, 30, 2], [5] * 40, list(range(1, 60))]
TOKENS = 24


MEASURED = {
    Point(1, 8, 512): {"triton": 1.0, "flash": 2.0},
    Point(2, 8, 512): {"triton": 2.0, "flash": 1.0},
}


class PlainFlash:
    """The first pass over latents in torch operations that a recorded graph can replay."""

    def __init__(self) -> None:
        self.plans = self.passes = self.captured = 0
        self.nan_before, self.nan_after = torch.zeros(2, dtype=torch.bool)

    def kind(self, latent: Any) -> Any:
        """A kind of layers with this first pass and our second one."""
        passes = Passes(self.plan, self.prefix, self.own)
        return latent._replace(passes=passes, why_not=lambda layer: None)

    def plan(self, batch: LatentBatch, **options: Any) -> torch.Tensor:
        self.plans += 1
        return batch.prefix_lens.clone()

    def prefix(
        self, batch: LatentBatch, *, plan: torch.Tensor, multiprocessors: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.passes += 1
        self.captured += torch.cuda.is_current_stream_capturing()
        keys = batch.latents[batch.block_table[: len(plan)].long()].float().flatten(1, 2)
        both = torch.cat([batch.query, batch.query_rope], dim=-1).float()
        rows = both.unflatten(0, (len(plan), batch.max_rows))
        logits = torch.einsum("brhd,bnd->bhrn", rows, keys) * batch.scale
        seen = torch.arange(keys.shape[1]) < plan[:, None]
        logits = logits.masked_fill(~seen[:, None, None], float("-inf"))
        latents = keys[..., : batch.query.shape[2]]
        out = torch.einsum("bhrn,bnd->brhd", logits.softmax(-1), latents)
        lse = logits.logsumexp(-1).transpose(0, 1).flatten(1, 2)
        return out.flatten(0, 1).to(batch.query.dtype), lse

    def own(self, batch: LatentBatch, *given: torch.Tensor) -> None:
        """Our second pass; replays note, too, whether there is NaN before and behind it."""
        self.nan_before.logical_or_(given[0].isnan().any())
        attend_own_latents(batch, *given)
        self.nan_after.logical_or_(given[2].isnan().any())


def grafted(llm: Any) -> int:
    """How many layers of the target are ours."""
    layers = model_runner(llm).vllm_config.compilation_config.static_forward_context.values()
    return sum(isinstance(getattr(layer, "forward_impl", None), TreeLatents) for layer in layers)


def test_trees_answer_as_the_target_alone(
    tmp_path: Path, learn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts from a table of the target's tokens are accepted far more than a random head's."""
    target = write_deepseek(tmp_path / "target", heads=2)
    draft = write_eagle3(tmp_path / "draft", draft_shape())
    options: dict[str, Any] = {
        "max_model_len": 128,
        # Prompts are longer, and are computed whole on a CPU.
        "max_num_batched_tokens": 32,
        # The third request waits for one of the others: its prompt meets trees.
        "max_num_seqs": 2,
        "skip_tokenizer_init": True,
    }
    with cpu_engine(target, attention_backend="CPU_MLA", **options) as llm:
        expected = greedy(llm, PROMPTS, TOKENS)
    learn(expected)
    options |= table_drafter.table_trees(draft)
    with cpu_engine(target, attention_backend="CPU_MLA", **options) as llm:
        assert greedy(llm, PROMPTS, TOKENS) == expected
        metrics = spec_metrics(llm)
        assert grafted(llm) == 4
        assert model_runner(llm).speculator.context.counters.mixed_launches
        [choice] = model_runner(llm).speculator.trees.attention_choices
        assert choice.why == "this device has no FlashAttention 3 for latents"
    assert metrics.accepted_tokens > metrics.drafts
    # The backend and the kernels of a GPU, interpreted, in FULL graphs.
    with recorded_engine(target, graphs=[8, 16], **options) as llm:
        assert greedy(llm, PROMPTS, TOKENS) == expected
        assert grafted(llm) == 4
        assert model_runner(llm).speculator.context.counters.tree_replays
    # Two passes, in the graphs for which they were measured to be faster.
    plain = PlainFlash()
    with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(attention_timing, "_LATENT", plain.kind(attention_timing._LATENT))
        patch.setattr(attention_timing, "measure", lambda *_: MEASURED)
        llm = stack.enter_context(recorded_engine(target, graphs=[8, 16], **options))
        assert greedy(llm, PROMPTS, TOKENS) == expected
        counters = model_runner(llm).speculator.context.counters
        [choice] = model_runner(llm).speculator.trees.attention_choices
        assert (choice.of(1, 8), choice.of(2, 8)) == ("triton", "flash")
        # A plan serves the target's four layers, and replays read no plan of another batch.
        assert plain.passes == 4 * plain.plans > 0
        assert plain.captured > 0
        assert counters.tree_replays
        assert (bool(plain.nan_before), bool(plain.nan_after)) == (True, False)
    # Negative control: where what is accepted stays in its slots, tokens differ.
    monkeypatch.setattr(LatentFamily, "state", lambda *_: UnchangedState())
    with cpu_engine(target, attention_backend="CPU_MLA", **options) as llm:
        assert greedy(llm, PROMPTS, TOKENS) != expected


# --- on a device: the platform's backends, FULL graphs, mixed batches ---------------------------

HIDDEN, HEADS = 512, 16


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("latents")
    target = write_deepseek(folder / "target", heads=HEADS, hidden=HIDDEN)
    return str(target), str(write_eagle3(folder / "draft", draft_shape(HIDDEN)))


def check_parts(llm: Any) -> None:
    """Trees ran, in graphs and beside prompts, on every layer of the target."""
    assert grafted(llm) == 4
    counters, metrics = model_runner(llm).speculator.context.counters, spec_metrics(llm)
    print(f"counters: {counters}; {metrics}")
    assert counters.tree_replays > 0
    assert counters.mixed_launches > 0
    assert metrics.accepted_tokens > metrics.drafts


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "dtype", "cache", "attention"),
    [
        ("TRITON_MLA", "float16", "auto", "triton"),
        ("FLASH_ATTN_MLA", "bfloat16", "auto", "flash"),
        ("TRITON_MLA", "bfloat16", "fp8", "auto"),
    ],
)
def test_the_platform_s_backends(
    models: tuple[str, str],
    backend: str,
    dtype: str,
    cache: str,
    attention: str,
    learn: Any,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    target, draft = models
    given = request, target, backend, dtype, cache
    # Else the draft would get the target's backend, which has no plain attention.
    speculative = {"method": "eagle3", "model": draft, "attention_backend": "TRITON_ATTN"}
    trees: dict[str, Any] = {"tokens": 7, "speculative": speculative, "topk": 2, "steps": 4}
    trees["drafter"] = "table"
    with latent_engine(*given) as llm:
        expected = answers(llm, LONG_PROMPTS, LONG_TOKENS)
    learn(expected)
    with latent_engine(*given, attention=attention, **trees) as llm:
        found = answers(llm, LONG_PROMPTS, LONG_TOKENS)
        check_parts(llm)
        [choice] = model_runner(llm).speculator.trees.attention_choices
        assert set(choice.used.values()) == {"flash" if attention == "flash" else "triton"}
    check_near_ties(found, expected, near(dtype, cache))
    if dtype == "float16":
        # Negative control: what is accepted stays where it was written.
        monkeypatch.setattr(LatentFamily, "state", lambda *_: UnchangedState())
        with latent_engine(*given, **trees) as llm:
            spoilt = departures(answers(llm, LONG_PROMPTS, LONG_TOKENS), expected)
        print(f"without moves: {spoilt}")
        assert any(each.gap >= near(dtype, cache) for each in spoilt)
