"""Compare three ways to run vision encoders: eager, vLLM's own encoder graphs, and ours.

    vllm-graft bench vit --seconds 240 --json vit.json --plot vit.svg

Towers have the true shapes of Qwen3-VL-8B and Qwen2.5-VL-7B and random weights; nothing is
downloaded. All arms run in this process on the same inputs, in turns. Sections:

  speed     one image of 224 to 1344 pixels, 4 and 20 images of 336: milliseconds per call
  stream    images of natural sizes from a cold start: total time, time in captures
  memory    what the allocator holds for our graphs, for several budgets
  matrix    random batches: is the answer of our graphs the model's?
  failures  inputs with which vLLM's graphs give wrong embeddings or raise (last, as what they
            write may break the process)

Every row is printed when it is known; `--seconds` ends each section in time. An asterisk marks an
arm whose manager left the call to the model.
"""

from __future__ import annotations

import argparse
import os

SUMMARY = "vision encoders: eager, stock encoder graphs, ours"

SECTIONS = ("speed", "stream", "memory", "matrix", "failures")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    from vllm_graft.bench.vision.arms import ARMS, RUNNER
    from vllm_graft.bench.vision.random_towers import TOWERS

    parser.add_argument("--towers", nargs="+", choices=TOWERS, default=list(TOWERS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["eager", "stock", "ours"])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--seconds", type=float, help="limit of all sections, from vLLM's import on"
    )
    parser.add_argument("--blocks", type=_positive, default=5, help="turns of an arm (speed)")
    parser.add_argument("--per-block", type=_positive, default=4, help="calls in a turn (speed)")
    parser.add_argument("--warm", type=_positive, default=4, help="calls before (speed)")
    parser.add_argument("--matrix", type=_positive, default=2000, help="batches, of all towers")
    parser.add_argument("--stream", type=_positive, default=2000, help="requests")
    parser.add_argument(
        "--stream-eager", type=_positive, default=500, help="requests that eager answers"
    )
    parser.add_argument(
        "--memory", nargs="+", type=_positive, default=[512, 64], help="budgets in MiB (memory)"
    )
    parser.add_argument(
        "--memory-requests", type=_positive, default=300, help="requests for each budget"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the matrix's batches")
    parser.add_argument("--graft", default="{}", metavar="JSON", help="keys of graft.vit for ours")
    parser.add_argument("--runner", default=RUNNER, metavar="MODULE:CLASS", help="our manager")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small towers; --device cpu needs it")


def run(arguments: argparse.Namespace) -> int:
    """Measure; status 1 if a section of it failed."""
    # Set before vLLM is imported: its log would stand between rows, and nothing is downloaded.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm_graft.bench.vision.session import Session

    return Session(arguments).run()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
