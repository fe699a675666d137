"""Put random configurations, mutated from good ones, through the frontend's whole validation.

    python -m benchmarks.fuzz.config --inputs 10000 --seed 7

Each input is a value of ``additional_config`` and one of ``kv_connector_extra_config``, as the
Python API takes them: misspelt and misplaced keys, wrong types, numbers that are none, bytes, texts
that no terminal shows, connectors below ``MultiConnector``. Nothing but a `ConfigError` may come
out, whose message names the full flag; what is accepted has to be read alike in another process,
and its store and policy have to be made. No model is loaded. An input that is judged
wrongly is printed with the number that makes it again (``--only``), and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fuzz.config.frontend import Frontend, vllm_reads
from benchmarks.fuzz.config.inputs import Case, Inputs
from benchmarks.fuzz.config.verdict import problem_of
from vllm_graft.base.errors import ConfigError


@contextmanager
def quiet_place() -> Iterator[Path]:
    """Make a directory the home and the working directory, and silence the logs."""
    before, home, level = Path.cwd(), os.environ.get("HOME"), logging.root.manager.disable
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "hot.json").write_text(json.dumps(list(range(40))))
        (root / "hot.txt").write_text("1\n2\n3\n")
        os.chdir(root)
        os.environ["HOME"] = folder
        logging.disable(logging.CRITICAL)
        try:
            yield root
        finally:
            logging.disable(level)
            os.chdir(before)
            os.environ["HOME"] = home or ""


def fuzz(
    numbers: range, seed: int, whole_every: int, report: Callable[[str], None] = print
) -> Counter[str]:
    """Judge inputs.

    Args:
        numbers: numbers of the inputs.
        seed: the seed of all inputs.
        whole_every: one in so many inputs also goes through all of vLLM's own validation.
        report: takes a line for each input that is judged wrongly.

    Returns:
        How many were ``accepted``, ``refused`` and ``wrong``.
    """
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as models:
        # This comes before the home directory changes: vLLM caches there what it knows of models.
        frontend = Frontend(Path(models))
        with quiet_place() as root:
            inputs = Inputs(seed, root)
            for number in numbers:
                checks = [frontend.quick]
                if number % whole_every == 0 and vllm_reads(inputs.make(number)):
                    checks.append(frontend.whole)
                for check in checks:
                    found[_judge(inputs, number, check, report)] += 1
    return found


def _judge(
    inputs: Inputs, number: int, check: Callable[[Case], Any], report: Callable[[str], None]
) -> str:
    try:
        problem = problem_of(inputs.make(number), check, inputs.root)
    except ConfigError:
        return "refused"
    if problem is None:
        return "accepted"
    report(f"--seed {inputs.seed} --only {number} ({check.__name__}): {problem}")
    return "wrong"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="which")
    parser.add_argument("--only", type=int, help="the number of a single input")
    parser.add_argument(
        "--whole", type=int, default=1, help="every so many-th through vLLM's own validation too"
    )
    arguments = parser.parse_args()
    numbers = range(arguments.inputs)
    if arguments.only is not None:
        numbers = range(arguments.only, arguments.only + 1)
    found = fuzz(numbers, arguments.seed, 1 if arguments.only is not None else arguments.whole)
    print(", ".join(f"{count} {name}" for name, count in sorted(found.items())))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    import torch

    if not torch.cuda.is_available():
        from vllm_graft.testing import engine, torchvision_import
        from vllm_graft.testing.interpreter import install as interpreter

        interpreter.install()
        torchvision_import.install()
        engine.set_environment()
    sys.exit(main())
