"""A target with its EAGLE-3 head, engines of it in this process, and what they answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


@dataclass(frozen=True)
class Pair:
    """A target, an EAGLE-3 head trained for it, and prompts that neither has seen.

    On the `device` ``cuda`` engines are those of `exact_engine`.
    """

    target: str
    draft: str
    prompts: list[str]
    device: str = "cpu"

    @classmethod
    def load(cls, folder: Path) -> Pair:
        """Read a folder with `target`, `eagle3` and `prompts.json`."""
        prompts = json.loads((folder / "prompts.json").read_text())
        return cls(str(folder / "target"), str(folder / "eagle3"), prompts)

    def on(self, device: str) -> Pair:
        return replace(self, device=device)

    def engine(
        self,
        *,
        nodes: int = 0,
        topk: int = 4,
        steps: int = 4,
        chain: int = 0,
        draft: str | None = None,
        tree: dict[str, Any] | None = None,
        graft: dict[str, Any] | None = None,
        ranges: list[tuple[int, int, int]] | None = None,
        method: str = "eagle3",
        speculative: dict[str, Any] | None = None,
        **options: Any,
    ) -> contextlib.AbstractContextManager[LLM]:
        """An engine in this process: with a tree of `nodes`, a stock chain, or no drafts.

        With `graphs` on a CPU it is a `recorded_engine`. `ranges` is vLLM's
        ``num_speculative_tokens_per_batch_size``, one of the keys of ``speculative_config``, of
        which `speculative` has others. `graft` has sections beside ``graft.tree``.
        """
        from tests.support.engines.gpu_engines import exact_engine
        from tests.support.engines.recorded_engine import recorded_engine
        from vllm_graft.testing.engine import cpu_engine

        tokens = nodes or chain
        if tokens:
            options["speculative_config"] = {
                "method": method,
                "model": None if method.startswith("ngram") else draft or self.draft,
                "num_speculative_tokens": tokens,
                **(speculative or {}),
            }
            if ranges:
                options["speculative_config"]["num_speculative_tokens_per_batch_size"] = ranges
        if nodes:
            keys = {"topk": topk, "steps": steps, **(tree or {})}
            options["additional_config"] = {"graft": {"tree": keys, **(graft or {})}}
        if self.device == "cuda":
            return exact_engine(self.target, drafts=tokens, **options)
        made = recorded_engine if options.get("graphs") else cpu_engine
        return made(self.target, **options)


def crowded(requests: int = 4, *, tokens: int = 72, blocks: int = 0, **more: Any) -> dict[str, Any]:
    """Options: chunked prompts, cached prefixes, async scheduling and, of few blocks, preemption.

    With one of its own, an option of ``more`` counts.
    """
    few = {"num_gpu_blocks_override": blocks} if blocks else {}
    usual = {"max_num_seqs": requests, "max_num_batched_tokens": tokens, **few}
    return usual | {"enable_prefix_caching": True, "async_scheduling": True} | more


@dataclass(frozen=True)
class Request:
    """A prompt, what differs from the defaults of vLLM's sampling parameters, and an adapter.

    `prompt` is a text, or what else ``vllm.LLM`` takes for one.
    `adapter` is the folder of a LoRA adapter on the target; None for none.
    """

    prompt: Any
    params: dict[str, Any]
    adapter: str | None = None


@dataclass(frozen=True)
class Answer:
    """What must be equal with and without drafts, a list entry for each of `n` answers."""

    tokens: list[list[int]]
    texts: list[str]
    reasons: list[str | None]
    logprobs: list[list[dict[int, float]]] = field(compare=False)
    cached: int = field(default=0, compare=False)

    @classmethod
    def of(cls, output: RequestOutput) -> Answer:
        places = [answer.logprobs or [] for answer in output.outputs]
        places.append([place for place in output.prompt_logprobs or [] if place])
        return cls(
            [list(answer.token_ids) for answer in output.outputs],
            [answer.text for answer in output.outputs],
            [answer.finish_reason for answer in output.outputs],
            [[{t: entry.logprob for t, entry in p.items()} for p in each] for each in places],
            output.num_cached_tokens or 0,
        )


def answer_all(llm: LLM, requests: list[Request]) -> list[Answer]:
    """Answers of an engine to requests that it gets at once."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = [SamplingParams(**{"ignore_eos": True, **request.params}) for request in requests]
    folders = dict.fromkeys(request.adapter for request in requests if request.adapter)
    loaded = {each: LoRARequest(each, i, each) for i, each in enumerate(folders, start=1)}
    adapters = [loaded.get(request.adapter or "") for request in requests]
    prompts = [request.prompt for request in requests]
    used = adapters if any(adapters) else None
    outputs = llm.generate(prompts, params, lora_request=used, use_tqdm=False)
    return [Answer.of(output) for output in outputs]


def differing(found: list[Answer], expected: list[Answer]) -> list[int]:
    """Indices of the answers that are not equal; both lists have the same length."""
    return [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]


@dataclass
class Schedule:
    """What an engine's scheduler did, counted over its steps."""

    prompt_chunks: int = 0
    """Steps that computed a part of a prompt but not its end."""
    chunks_beside_drafts: int = 0
    """How many of these steps verified drafts of another request."""
    preempted: int = 0
    cut_trees: int = 0
    """Trees of which fewer nodes were scheduled than drafted."""


@contextlib.contextmanager
def scheduling(llm: LLM) -> Iterator[Schedule]:
    """Count what the scheduler does inside the ``with`` block."""
    core: Any = llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    nodes = scheduler.num_spec_tokens
    seen = Schedule()
    stock = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        drafts = output.scheduled_spec_decode_tokens
        chunks = [
            name
            for name in output.num_scheduled_tokens
            if scheduler.requests[name].num_computed_tokens
            < scheduler.requests[name].num_prompt_tokens
        ]
        seen.prompt_chunks += len(chunks)
        seen.chunks_beside_drafts += bool(chunks and drafts)
        seen.preempted += len(output.preempted_req_ids or ())
        seen.cut_trees += sum(0 < len(tokens) < nodes for tokens in drafts.values())
        return output

    scheduler.schedule = schedule
    try:
        yield seen
    finally:
        del scheduler.schedule


def counter(llm: LLM, name: str) -> float:
    """Value of one of an engine's counters, by its Prometheus name."""
    return float(sum(getattr(m, "value", 0) for m in llm.get_metrics() if m.name == name))
