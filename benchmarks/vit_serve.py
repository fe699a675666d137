"""Serve a Qwen3-VL with the whole tower and few text layers: encoder time and text of each arm.

python -m benchmarks.vit_serve --seconds 190 --json vit_serve.json

Each arm is an engine of its own in this process, with the same made-up weights and the same images
of noise, one request at a time. The encoder's time is the engine's own
(`enable_mm_processor_stats`, which waits for the device). The text has to be that of the arm
without graphs; in 16 bits a near-tie may fall otherwise, so each difference is listed with the
margin of the token there: the logprob of the best token minus that of the second best.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_graft.bench.common.answers import first_difference, token_margins

NEAR_TIE = 0.1
"""Largest margin in nats that bf16 may turn over: steps of logits near 4 are 0.016 to 0.03."""

_STOCK = {"cudagraph_mm_encoder": True}
_COMPILED = {"mode": 3, "compile_mm_encoder": True}

ARMS: dict[str, tuple[bool, dict[str, Any]]] = {
    "off": (False, {}),
    "stock": (False, _STOCK),
    "ours": (True, {}),
    "off+compile": (False, _COMPILED),
    "ours+compile": (True, _COMPILED),
}
"""Whether ``graft.vit`` is given, and keys of ``--compilation-config``."""

SIZES = (224, 336, 448, 560, 672, 896)
TINY_SIZES = (64, 96, 128)

TEXT = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
"""Sizes of Qwen3-VL-8B, but for 4 layers instead of 36 and a small vocabulary."""


@dataclass
class Answer:
    """One request.

    Attributes:
        size: edge of the image, in pixels.
        tokens: the answer.
        margins: for each token, its logprob minus that of the second best.
        encoder_ms: milliseconds in the encoder, a wait for the device included.
        seconds: from the request to its last token.
    """

    size: int
    tokens: list[int]
    margins: list[float]
    encoder_ms: float
    seconds: float


@dataclass(frozen=True)
class Difference:
    """The first token of an answer that differs from the answer without graphs."""

    request: int
    size: int
    position: int
    margin: float

    @property
    def near_tie(self) -> bool:
        """Whether the margin is so small that rounding may turn it over."""
        return self.margin <= NEAR_TIE


@dataclass
class Arm:
    """One engine: its answers, and the counters of our part."""

    name: str
    start: float
    answers: list[Answer] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    def encoder_ms(self, size: int) -> float:
        """Median milliseconds in the encoder for one size."""
        return statistics.median(a.encoder_ms for a in self.answers if a.size == size)


def differences(answers: Sequence[Answer], expected: Sequence[Answer]) -> list[Difference]:
    """Find where texts part, with the margin of the expected token."""
    found = []
    for number, (mine, theirs) in enumerate(zip(answers, expected, strict=True)):
        position = first_difference(mine.tokens, theirs.tokens)
        if position is not None:
            margin = min(mine.margins[position], theirs.margins[position])
            found.append(Difference(number, mine.size, position, margin))
    return found


@contextlib.contextmanager
def engine(folder: Path, name: str, tiny: bool) -> Iterator[Any]:
    """Build the engine of an arm and capture its graphs; all arms have the same weights."""
    graft, compilation = ARMS[name]
    # Layouts are captured as they come: the steady state is measured, not the ration of captures.
    vit: dict[str, Any] = {"capture_share": 1, **({"max_patches": 256} if tiny else {})}
    options: dict[str, Any] = {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "NONE", **compilation},
        "limit_mm_per_prompt": {"image": 1, "video": 0},
        "mm_processor_cache_gb": 0,
        "enable_prefix_caching": False,
        "enable_mm_processor_stats": True,
        "additional_config": {"graft": {"vit": vit}} if graft else {},
    }
    if tiny:
        with _tiny_engine(folder, options) as llm:
            yield llm
        return
    import torch

    from vllm_graft.testing import running

    options |= {"load_format": "dummy", "dtype": "bfloat16", "gpu_memory_utilization": 0.5}
    options |= {"max_model_len": 8192, "max_num_batched_tokens": 8192}
    with running(folder, **options) as llm:
        randomise(_runner(llm).get_model())
        torch.cuda.synchronize()
        yield llm


@contextlib.contextmanager
def _tiny_engine(folder: Path, options: dict[str, Any]) -> Iterator[Any]:
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401  It replaces parts of torch: before the stand-ins.
    from vllm.model_executor.models import qwen3_vl
    from vllm.platforms.cpu import CpuPlatform

    from vllm_graft.bench.vision import standins
    from vllm_graft.testing import cpu_engine

    graphs = classmethod(lambda cls: True)
    options |= {"max_model_len": 512, "max_num_batched_tokens": 512}
    with (
        standins.cpu(),
        mock.patch.object(CpuPlatform, "support_static_graph_mode", graphs),
        mock.patch.object(qwen3_vl, "HAS_TRITON", False),  # An interpreted kernel takes seconds.
        cpu_engine(folder, **options) as llm,
    ):
        if _encoder(llm).cudagraph_manager is not None:
            # The CPU's worker captures nothing.
            _encoder(llm).cudagraph_manager.capture(graph_pool=torch.cuda.graph_pool_handle())
        yield llm


def randomise(model: Any) -> None:
    """Write the same weights into each engine, in place, because graphs hold their addresses.

    vLLM's dummy weights are almost zero, so that no image would change the text.
    """
    import torch

    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight[0].numel() ** -0.5, generator=generator)
            elif name.endswith("weight"):
                weight.fill_(1.0)
            else:
                weight.normal_(std=0.02, generator=generator)


def ask(llm: Any, size: int, seed: int, tokens: int) -> Answer:
    """Ask about one image of noise, with no other request in flight."""
    from vllm import SamplingParams

    from tests.support.vision import vision_models

    image = vision_models.noise_image(size, size, seed)
    request = {"prompt": vision_models.QWEN_PROMPT, "multi_modal_data": {"image": image}}
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    _encoder(llm).encoder_timing_registry.clear()
    started = time.perf_counter()
    (output,) = llm.generate([request], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    stats = _encoder(llm).get_encoder_timing_stats().values()
    timed = sum(float(found["encoder_forward_secs"]) for found in stats)
    answer = output.outputs[0]
    return Answer(size, list(answer.token_ids), token_margins(answer), 1000 * timed, seconds)


def run_arm(name: str, folder: Path, sizes: Sequence[int], arguments: argparse.Namespace) -> Arm:
    """Build the engine, warm each size up, and ask."""
    started = time.perf_counter()
    with engine(folder, name, arguments.tiny) as llm:
        arm = Arm(name, round(time.perf_counter() - started, 1))
        for seed in range(arguments.warm):
            for size in sizes:
                ask(llm, size, 1000 + seed, arguments.tokens)
        for seed in range(arguments.rounds):
            for size in sizes:
                arm.answers.append(ask(llm, size, seed, arguments.tokens))
        (report,) = llm.collective_rpc("graft_info") if ARMS[name][0] else ({"counters": {}},)
        arm.counters = report["counters"].get("vit", {})
    return arm


def _runner(llm: Any) -> Any:
    from vllm_graft.testing import model_runner

    return model_runner(llm)


def _encoder(llm: Any) -> Any:
    return _runner(llm).model_state.encoder_runner


def table(arms: Sequence[Arm], sizes: Sequence[int]) -> list[str]:
    """Lay out milliseconds of the encoder by size, and where texts differ."""
    names = [arm.name for arm in arms]
    lines = ["| px | " + " | ".join(f"{name} ms" for name in names) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for size in sizes:
        cells = [f"{arm.encoder_ms(size):.2f}" for arm in arms]
        lines.append("| " + " | ".join([str(size), *cells]) + " |")
    for arm in arms:
        far = [d for d in arm.differences if not d.near_tie]
        same = len(arm.answers) - len(arm.differences)
        lines.append(
            f"{arm.name}: start {arm.start} s; {same} of {len(arm.answers)} texts as without "
            f"graphs, {len(arm.differences) - len(far)} part at near-ties, {len(far)} elsewhere; "
            f"by tier {arm.counters.get('items', {})}, failures {arm.counters.get('failures', [])}"
        )
        lines += [
            f"  request {d.request} ({d.size} px), token {d.position}: margin {d.margin:.4f}"
            for d in arm.differences
        ]
    return lines


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--sizes", nargs="+", type=int, help="edges in pixels")
    parser.add_argument("--rounds", type=int, default=8, help="images of each size")
    parser.add_argument("--warm", type=int, default=3, help="images of each size before")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no arm after")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; status 1 if a text differs by more than a near-tie, or an arm was left out."""
    arguments = parse(argv)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sizes = arguments.sizes or list(TINY_SIZES if arguments.tiny else SIZES)
    arms: list[Arm] = []
    begun, last = time.perf_counter(), 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(Path(temporary) / "model", arguments.tiny)
        for name in arguments.arms:
            passed = time.perf_counter() - begun
            # The first arm loads and compiles what later ones find.
            if passed + (last if len(arms) > 1 else 0.0) > arguments.seconds:
                print(f"out of time before {name}", flush=True)
                break
            arm = run_arm(name, folder, sizes, arguments)
            last = time.perf_counter() - begun - passed
            reference = "off+compile" if name.endswith("+compile") else "off"
            plain = next((a for a in [*arms, arm] if a.name == reference), None)
            if plain is not None:
                arm.differences = differences(arm.answers, plain.answers)
            arms.append(arm)
            print(f"{name}: {last:.0f} s", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps([asdict(a) for a in arms], indent=1) + "\n")
    print("\n".join(table(arms, sizes)), flush=True)
    wrong = any(not d.near_tie for arm in arms for d in arm.differences)
    return 1 if wrong or len(arms) < len(arguments.arms) else 0


def write_model(folder: Path, tiny: bool) -> Path:
    """Write the checkpoint: with weights on a CPU, else without any."""
    from tests.support.vision import vision_models

    if tiny:
        from vllm_graft.testing import torchvision_import
        from vllm_graft.testing.interpreter import install as interpreter

        interpreter.install()
        torchvision_import.install()
        return vision_models.write_qwen3_vl(folder)
    from vllm_graft.bench.vision.random_towers import TOWERS

    return vision_models.write_qwen3_vl(
        folder, vision=TOWERS["qwen3"].vision, text=TEXT, weights=False
    )


if __name__ == "__main__":
    raise SystemExit(main())
