"""Time a standalone draft model: without graphs, with its loop in graphs, with all of it in graphs.

python -m benchmarks.draft_model --json draft_model.json

Each arm is an engine of its own, and the arms take turns. The result is the time of a step,
(time of long answers - time of one token) / steps, because dummy weights say nothing about
acceptance.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_graft.testing import TinyShape

ARMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "loop": {"draft": {"extend": False}},
    "graphs": {"draft": {}},
}
TARGET = TinyShape(128256, 4096, 14336, 32, 32, 8, 128, 8192)
"""The shape of Llama-3.1-8B."""
DRAFT = replace(TARGET, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64)
"""The shape of Llama-3.2-1B."""
TINY = TinyShape(num_layers=2)


def write_config(folder: Path, shape: TinyShape, dtype: str) -> Path:
    """Write a checkpoint without weights."""
    from vllm_graft.testing.models import llama as models

    config = models.model_config(shape, shape.num_layers, "LlamaForCausalLM")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
    return folder


@contextlib.contextmanager
def engine(folder: Path, graft: dict[str, Any], steps: int, batches: list[int]) -> Iterator[Any]:
    options: dict[str, Any] = {
        "speculative_config": {
            "method": "draft_model",
            "model": str(folder / "draft"),
            "num_speculative_tokens": steps,
        },
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "additional_config": {"graft": graft} if graft else {},
    }
    if not torch.cuda.is_available():
        from vllm_graft.testing import cpu_engine

        sizes = sorted({*batches, max(batches) * (steps + 1)})
        with cpu_engine(folder / "target", graphs=sizes, **options) as llm:
            yield llm
        return
    from vllm import LLM

    llm = LLM(str(folder / "target"), max_model_len=4096, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def generate(llm: Any, batch: int, prompt: int, tokens: int) -> float:
    """Return the seconds that a batch of answers of so many tokens takes."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": [3 + (i + j) % 99 for j in range(prompt)]} for i in range(batch)
    ]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def step_seconds(llm: Any, batch: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Return the seconds of a step, and the tokens per request that it yields."""
    from vllm_graft.testing import spec_metrics

    short = generate(llm, batch, prompt, 1)
    before = spec_metrics(llm).drafts
    long = generate(llm, batch, prompt, tokens)
    steps = max(1, spec_metrics(llm).drafts - before) / batch
    return (long - short) / steps, (tokens - 1) / steps


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[int, list[Any]]]:
    found: dict[str, dict[int, list[Any]]] = {
        arm: {batch: [] for batch in options.batches} for arm in ARMS
    }
    for turn in range(options.turns):
        # The order alternates, so that neither arm always runs on the warmer device.
        for arm in list(ARMS)[:: -1 if turn % 2 else 1]:
            with engine(folder, ARMS[arm], options.steps, options.batches) as llm:
                for batch in options.batches:
                    step_seconds(llm, batch, options.prompt, options.tokens)
                    found[arm][batch] += [
                        step_seconds(llm, batch, options.prompt, options.tokens)
                        for _ in range(options.repeats)
                    ]
                if ARMS[arm]:
                    [told] = llm.collective_rpc("graft_info")
                    print(f"turn {turn}, {arm}: {told['counters']['draft']}")
    return found


def table(found: dict[str, dict[int, list[Any]]]) -> list[dict[str, float]]:
    rows = []
    print(f"{'batch':>5} " + " ".join(f"{arm + ' ms':>10}" for arm in found) + f" {'speed-up':>8}")
    for batch in found["stock"]:
        middle = {
            arm: statistics.median(seconds for seconds, _ in runs[batch]) * 1e3
            for arm, runs in found.items()
        }
        yields = {arm: statistics.mean(y for _, y in runs[batch]) for arm, runs in found.items()}
        gain = middle["stock"] / middle["graphs"]
        shown = " ".join(f"{time:>10.2f}" for time in middle.values())
        told = ", ".join(f"{value:.2f}" for value in yields.values())
        print(f"{batch:>5} {shown} {gain:>8.2f}   tokens per step: {told}")
        rows.append({"batch": batch, **middle, "speed_up": gain})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=5, help="num_speculative_tokens")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--turns", type=int, default=2, help="engines of each arm")
    parser.add_argument("--repeats", type=int, default=5, help="measurements an engine and batch")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder / "target", TINY if options.tiny else TARGET, "bfloat16")
        write_config(folder / "draft", TINY if options.tiny else DRAFT, "bfloat16")
        found = measure(options, folder)
    rows = table(found)
    if options.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        said = {**vars(options), "json": str(options.json), "device": device}
        options.json.write_text(json.dumps({"options": said, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
