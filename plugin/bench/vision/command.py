"""Time in a model's vision encoder: run eagerly, in vLLM's own encoder graphs, and in ours.

    vllm-graft bench vit MODEL --images FOLDER --seconds 600

A measurement is all images of a folder, one after another, or one image of noise of a size,
`--rounds` times. The table has the medians: milliseconds of an image in the encoder and, in
brackets, of the whole request. An arm is

- `off`, the encoder runs eagerly;
- `stock`, vLLM's own encoder graphs (`cudagraph_mm_encoder`);
- `ours`, `graft.vit`, with your keys of it. Here layouts are captured as soon as they come, which
  serving spreads over time (`capture_share`).

`+compile` behind a name lets vLLM compile the encoder (`compile_mm_encoder`). Each answer is
compared with the first arm's. In 16 bits a near tie may fall otherwise; a difference at a larger
margin makes the exit status 1.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any

from vllm_graft.base.options import KEY
from vllm_graft.bench.common import arm_processes
from vllm_graft.bench.common.answers import Answer, Comparison
from vllm_graft.bench.common.answers import compare as compare_answers
from vllm_graft.bench.common.arm import (
    Arm,
    Row,
    advice,
    is_ours,
    median_row,
    panels,
    table,
    write_files,
)
from vllm_graft.bench.common.report import BenchmarkError, TimeLimit, add_seconds
from vllm_graft.bench.common.serve_flags import ADDITIONAL, Serving, adding, bare, groups

SUMMARY = "time in a vision encoder: eager, in vLLM's encoder graphs, in ours"

NAMES = ("off", "stock", "ours", "off+compile", "stock+compile", "ours+compile")

NEAR_TIE = 0.1
"""Largest margin in nats that bf16 may turn over: steps of logits near 4 are 0.016 to 0.03."""

DRAWN = {"encoder_ms": "ms in the encoder", "request_ms": "ms per request"}

QUESTION = "What is it?"

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@dataclass(frozen=True)
class Look:
    """A request of `tokens` with one image: a file, or noise of so many pixels by edge."""

    image: int | Path
    seed: int
    tokens: int


@dataclass(frozen=True)
class Seen:
    """One answer, and milliseconds: in the encoder, with a wait for the device, and in all."""

    answer: Answer
    encoder_ms: float
    request_ms: float


class Looking:
    """Answers each `Look` with a `Seen`, and ``"counters"`` with those of our graphs. `llm`: a
    ``vllm.LLM`` with ``enable_mm_processor_stats``. `prompt`: a text with the model's placeholder
    of an image; None asks by the chat template, and where a model has none, by the text with which
    vLLM profiles it."""

    def __init__(self, llm: Any, prompt: str | None) -> None:
        self._llm, self._prompt = llm, prompt

    def __call__(self, wish: Look | str) -> Any:
        return self.look(wish) if isinstance(wish, Look) else self.counters()

    def look(self, wish: Look) -> Seen:
        """Ask about one image, with no other request in flight."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=wish.tokens, ignore_eos=True, logprobs=2)
        image = picture(wish)
        self._llm.collective_rpc("get_encoder_timing_stats")  # Reading them forgets them.
        began = time.perf_counter()
        (output,) = self._ask(image, params)
        seconds = time.perf_counter() - began
        (stats,) = self._llm.collective_rpc("get_encoder_timing_stats")
        encoder = sum(each["encoder_forward_secs"] for each in stats.values())
        return Seen(Answer.of(output.outputs[0]), 1e3 * encoder, 1e3 * seconds)

    def counters(self) -> dict[str, Any]:
        (report,) = self._llm.collective_rpc("graft_info")
        found: dict[str, Any] = report["counters"].get("vit", {})
        return found

    def _ask(self, image: Any, params: Any) -> Any:
        if self._prompt is None:
            said = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": QUESTION}]
            chat = [{"role": "user", "content": said}]
            try:
                return self._llm.chat(chat, params, use_tqdm=False)
            except Exception as error:
                # Each version of vLLM has it in another module.
                if type(error).__name__ != "ChatTemplateResolutionError":
                    raise
                inputs = self._llm.renderer.get_mm_processor().dummy_inputs
                self._prompt = inputs.get_dummy_text({"image": 1}) + QUESTION
                print(f"There is no chat template: {self._prompt!r} is asked.", flush=True)
        request = {"prompt": self._prompt, "multi_modal_data": {"image": image}}
        return self._llm.generate([request], params, use_tqdm=False)


def picture(look: Look) -> Any:
    """The PIL image of a request."""
    from PIL import Image

    if isinstance(look.image, int):
        return noise(look.image, look.seed)
    return Image.open(look.image).convert("RGB")


def read_images(folder: Path) -> list[Path]:
    """A folder's images, by name; a BenchmarkError if there is none, or one can't be read."""
    from PIL import Image

    found = sorted(file for file in folder.glob("*") if file.suffix.lower() in SUFFIXES)
    if not found:
        raise BenchmarkError(
            f"--images {folder}: there is no image in it, or no such folder: give a folder with "
            f"files that end in {', '.join(SUFFIXES)}."
        )
    for file in found:
        try:
            Image.open(file).verify()
        except Exception as error:  # Of PIL's readers.
            raise BenchmarkError(f"--images {folder}: {file.name} can't be read: {error}") from None
    return found


def noise(size: int, seed: int) -> Any:
    """A square PIL image of random pixels."""
    import numpy
    from PIL import Image

    pixels = numpy.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype="uint8")
    return Image.fromarray(pixels)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark; those of `vllm serve` are read apart."""
    parser.add_argument("--arms", nargs="+", choices=NAMES, default=["off", "stock", "ours"])
    told = "edges of noise in pixels (default: %(default)s)"
    sizes = [224, 336, 448, 672, 896]
    parser.add_argument("--sizes", nargs="+", type=int, default=sizes, metavar="PX", help=told)
    told = "measure the images in it, and no noise"
    parser.add_argument("--images", type=Path, metavar="FOLDER", help=told)
    parser.add_argument("--warm", type=int, default=4, help="rounds before, which do not count")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each arm")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    told = "a text with the model's placeholder of an image (default: a chat, if it has a template)"
    parser.add_argument("--prompt", help=told)
    add_seconds(parser)


def read_arm(name: str, given: Serving) -> Arm:
    """Make the arm of a name. Raises `BenchmarkError` if vLLM or our part refuses it."""
    if given.config.model_config.multimodal_config is None:
        raise BenchmarkError(f"{given.model} takes text alone: give a model that takes images.")
    kind, _, compiled = name.partition("+")
    flags, told = bare(given), f"--arms {name}"
    compilation: dict[str, Any] = {"compile_mm_encoder": True} if compiled else {}
    if kind == "stock":
        compilation["cudagraph_mm_encoder"] = True
    if compilation:
        flags = adding(flags, "--compilation-config", compilation)
    graft = (given.request.engine.additional_config or {}).get(KEY)
    section = graft.get("vit", {}) if isinstance(graft, dict) else {}
    if kind == "ours":
        flags = adding(flags, ADDITIONAL, {KEY: {"vit": section}})
    arm = Serving.read(flags, told).arm(name)
    options = arm.options | {
        "limit_mm_per_prompt": {"image": 1},
        "mm_processor_cache_gb": 0,
        "enable_mm_processor_stats": True,
        "chat_template": given.request.chat_template,
    }
    if kind == "ours":
        caught = {KEY: {"vit": {"capture_share": 1, **section}}}
        options["additional_config"] = options["additional_config"] | caught
    return replace(arm, options=options)


Images = int | tuple[Path, ...]
"""The images of a measurement: noise of a size, or files."""


def take_turns(
    pipes: Mapping[Arm, Connection],
    arguments: argparse.Namespace,
    images: Images,
    limit: TimeLimit,
) -> tuple[list[Row], dict[str, list[Answer]]]:
    """Ask all arms about the images in turn, after rounds that warm up; return rows and answers."""
    files = (images,) if isinstance(images, int) else images
    case = {"px": images} if isinstance(images, int) else {"images": len(images)}
    means: dict[str, list[dict[str, float | None]]] = {arm.name: [] for arm in pipes}
    answers: dict[str, list[Answer]] = {arm.name: [] for arm in pipes}
    for seed in limit.rounds(arguments.warm + arguments.rounds, arguments.warm + 1):
        found: dict[str, list[Seen]] = {arm.name: [] for arm in pipes}
        for image, (arm, pipe) in product(files, pipes.items()):
            pipe.send(Look(image, seed, arguments.tokens))
            found[arm.name].append(arm_processes.answer(arm, pipe))
        for name, seen in found.items() if seed >= arguments.warm else ():
            answers[name] += [each.answer for each in seen]
            figures = ("encoder_ms", "request_ms")
            means[name].append({key: fmean(getattr(each, key) for each in seen) for key in figures})
    rows = [median_row(name, case, rounds) for name, rounds in means.items()]
    for row in rows:
        print(json.dumps(row.flat()), flush=True)
    return rows, answers


def compare(
    arms: Sequence[Arm], model: str, arguments: argparse.Namespace, looking: type[Looking]
) -> tuple[list[Row], list[Comparison]]:
    """Start the arms and let them take turns; return rows, and comparisons of the answers."""
    parted = groups(arms, 2 * max(each.options["max_model_len"] for each in arms))
    cases = [tuple(arguments.files)] if arguments.images else arguments.sizes
    limit = TimeLimit(arguments.seconds, len(parted))
    rows: list[Row] = []
    answers: dict[Images, dict[str, list[Answer]]] = {}
    for group in parted:
        pipes = arm_processes.start(group, model, partial(looking, prompt=arguments.prompt))
        for images in limit.within(cases):
            more, found = take_turns(pipes, arguments, images, limit)
            rows += more
            answers.setdefault(images, {}).update(found)
        for arm, pipe in pipes.items():
            if is_ours(arm.name):
                pipe.send("counters")
                print(f"{arm.name}: {arm_processes.answer(arm, pipe)}", flush=True)
        arm_processes.stop(pipes)
    comparisons = []
    for images, by_arm in answers.items():
        # Of engines that ran one after another, some may have had no time for as many rounds.
        least = min(map(len, by_arm.values()))
        compared = compare_answers({arm: found[:least] for arm, found in by_arm.items()})
        comparisons += compared
        what = f"{images} px" if isinstance(images, int) else f"{len(images)} images"
        print(*(f"{what}, {line}" for line in compared), sep="\n", flush=True)
    return rows, comparisons


def cell(row: Row) -> str:
    """Milliseconds in the encoder, and of the request in brackets."""
    return f"{row.main[1]:.2f} ({row.figures['request_ms']:.1f})"


def run(arguments: argparse.Namespace, flags: list[str], looking: type[Looking] = Looking) -> int:
    """Measure, print the table, write the files; status 1 if an answer differs beyond a tie."""
    arguments.files = read_images(arguments.images) if arguments.images else []
    given = Serving.read(flags)
    arms = [read_arm(name, given) for name in arguments.arms]
    rows, comparisons = compare(arms, given.model, arguments, looking)
    commands = {column: text for arm in arms for column, text in arm.commands.items()}
    print(table(rows, cell), flush=True)
    over = "images" if arguments.images else "px"
    write_files(arguments, rows, panels(rows, over, DRAWN), commands)
    print(advice(rows, commands))
    wrong = [margin for each in comparisons for margin in each.margins if margin > NEAR_TIE]
    return 1 if wrong else 0
