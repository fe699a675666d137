"""Time in a model's vision encoder: run eagerly, in vLLM's own encoder graphs, and in ours.

    vllm-graft bench vit MODEL --arms off stock ours --sizes 224 448 896

All arms are up at the same time, each in a process of its own with its share of the GPU's memory,
and take turns: one image of noise of each size, `--rounds` times. The table has the medians:
milliseconds in the encoder and, in brackets, of the whole request. An arm is

- `off`, the encoder runs eagerly;
- `stock`, vLLM's own encoder graphs (`cudagraph_mm_encoder`);
- `ours`, `graft.vit`, with the keys of `--graft`. Layouts are captured as soon as they come.

`+compile` behind a name lets vLLM compile the encoder (`compile_mm_encoder`). Each answer is
compared with the first arm's. In 16 bits a near tie may fall otherwise; a difference at a larger
margin makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vllm_graft.bench.common import arm_processes
from vllm_graft.bench.common.answers import Answer, Comparison
from vllm_graft.bench.common.answers import compare as compare_answers
from vllm_graft.bench.common.arm import Arm, Row, is_ours, median_row, panels, table, write_files

SUMMARY = "time in a vision encoder: eager, in vLLM's encoder graphs, in ours"

NAMES = ("off", "stock", "ours", "off+compile", "stock+compile", "ours+compile")

NEAR_TIE = 0.1
"""Largest margin in nats that bf16 may turn over: steps of logits near 4 are 0.016 to 0.03."""

DRAWN = {"encoder_ms": "ms in the encoder", "request_ms": "ms per request"}

QUESTION = "What is it?"


@dataclass(frozen=True)
class Look:
    """A request of `tokens` with one image of noise, of `size` pixels by edge."""

    size: int
    seed: int
    tokens: int


@dataclass(frozen=True)
class Seen:
    """One answer, and milliseconds: in the encoder, with a wait for the device, and in all."""

    answer: Answer
    encoder_ms: float
    request_ms: float

    @property
    def figures(self) -> dict[str, float | None]:
        return {"encoder_ms": self.encoder_ms, "request_ms": self.request_ms}


class Looking:
    """Answers each `Look` with a `Seen`, and ``"counters"`` with those of our graphs.

    Args:
        llm: a ``vllm.LLM`` with ``enable_mm_processor_stats``.
        prompt: a text with the model's placeholder of an image; None asks by the chat template.
    """

    def __init__(self, llm: Any, prompt: str | None) -> None:
        self._llm, self._prompt = llm, prompt

    def __call__(self, wish: Look | str) -> Any:
        return self.look(wish) if isinstance(wish, Look) else self.counters()

    def look(self, wish: Look) -> Seen:
        """Ask about one image, with no other request in flight."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=wish.tokens, ignore_eos=True, logprobs=2)
        image = noise(wish.size, wish.seed)
        self._llm.collective_rpc("get_encoder_timing_stats")  # Reading them forgets them.
        began = time.perf_counter()
        (output,) = self._ask(image, params)
        seconds = time.perf_counter() - began
        (stats,) = self._llm.collective_rpc("get_encoder_timing_stats")
        encoder = sum(each["encoder_forward_secs"] for each in stats.values())
        return Seen(Answer.of(output.outputs[0]), 1e3 * encoder, 1e3 * seconds)

    def counters(self) -> dict[str, Any]:
        """Counters of our graphs."""
        (report,) = self._llm.collective_rpc("graft_info")
        found: dict[str, Any] = report["counters"].get("vit", {})
        return found

    def _ask(self, image: Any, params: Any) -> Any:
        if self._prompt is not None:
            request = {"prompt": self._prompt, "multi_modal_data": {"image": image}}
            return self._llm.generate([request], params, use_tqdm=False)
        content = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": QUESTION}]
        return self._llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)


def noise(size: int, seed: int) -> Any:
    """A square PIL image of random pixels."""
    import numpy
    from PIL import Image

    pixels = numpy.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype="uint8")
    return Image.fromarray(pixels)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("model", help="checkpoint folder, or a name that vLLM knows")
    parser.add_argument("--arms", nargs="+", choices=NAMES, default=["off", "stock", "ours"])
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[224, 336, 448, 672, 896], help="edges in pixels"
    )
    parser.add_argument("--warm", type=int, default=4, help="images of each size before")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--graft", type=json.loads, default={}, metavar="JSON", help="of graft.vit")
    parser.add_argument(
        "--prompt", help="a text with the model's placeholder of an image (default: a chat)"
    )
    parser.add_argument("--max-model-len", type=int, default=8192)
    arm_processes.add_engine_arguments(parser)


def read_arm(name: str, graft: dict[str, Any]) -> Arm:
    """Make the arm of a name."""
    kind, _, compiled = name.partition("+")
    options: dict[str, Any] = {}
    compilation: dict[str, Any] = {"compile_mm_encoder": True} if compiled else {}
    if kind == "stock":
        compilation["cudagraph_mm_encoder"] = True
    if compilation:
        options["compilation_config"] = compilation
    if kind == "ours":
        options["additional_config"] = {"graft": {"vit": {"capture_share": 1, **graft}}}
    return Arm(name, options)


def engine_options(arm: Arm, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of ``vllm.LLM`` for an arm."""
    return {
        "max_model_len": arguments.max_model_len,
        "limit_mm_per_prompt": {"image": 1},
        "mm_processor_cache_gb": 0,
        "enable_mm_processor_stats": True,
        **arm_processes.with_options(arm.options, arguments.options),
    }


def take_turns(
    pipes: Mapping[Arm, Connection], arguments: argparse.Namespace, size: int
) -> tuple[list[Row], list[Comparison]]:
    """Ask all arms about images of one size in turn; the first ones only warm up."""
    found: dict[str, list[Seen]] = {arm.name: [] for arm in pipes}
    for seed in range(arguments.warm + arguments.rounds):
        for arm, pipe in pipes.items():
            pipe.send(Look(size, seed, arguments.tokens))
            seen: Seen = arm_processes.answer(arm, pipe)
            if seed >= arguments.warm:
                found[arm.name].append(seen)
    rows = [
        median_row(name, {"px": size}, [each.figures for each in found[name]]) for name in found
    ]
    for row in rows:
        print(json.dumps(row.flat()), flush=True)
    return rows, compare_answers({name: [each.answer for each in found[name]] for name in found})


def compare(
    arguments: argparse.Namespace, looking: type[Looking]
) -> tuple[list[Row], list[Comparison]]:
    """Start all arms and let them take turns; return rows, and comparisons of the answers."""
    read = [read_arm(name, arguments.graft) for name in arguments.arms]
    arms = {arm: engine_options(arm, arguments) for arm in read}
    make = partial(looking, prompt=arguments.prompt)
    pipes = arm_processes.start(arms, arguments.model, make, arguments.kv_cache_bytes)
    rows: list[Row] = []
    comparisons: list[Comparison] = []
    for size in arguments.sizes:
        more, compared = take_turns(pipes, arguments, size)
        rows, comparisons = rows + more, comparisons + compared
        for line in compared:
            print(f"{size} px, {line}", flush=True)
    for arm, pipe in pipes.items():
        if is_ours(arm.name):
            pipe.send("counters")
            print(f"{arm.name}: {arm_processes.answer(arm, pipe)}", flush=True)
    arm_processes.stop(pipes)
    return rows, comparisons


def cell(row: Row) -> str:
    """Milliseconds in the encoder, and of the request in brackets."""
    return f"{row.main[1]:.2f} ({row.figures['request_ms']:.1f})"


def run(arguments: argparse.Namespace, looking: type[Looking] = Looking) -> int:
    """Measure, print the table, write the files; status 1 if an answer differs beyond a tie."""
    rows, comparisons = compare(arguments, looking)
    print(table(rows, cell), flush=True)
    write_files(arguments, rows, panels(rows, "px", DRAWN))
    wrong = [margin for each in comparisons for margin in each.margins if margin > NEAR_TIE]
    return 1 if wrong else 0
