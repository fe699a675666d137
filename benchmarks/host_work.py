"""Compare two builds of vllm-graft by what the host does per step: operators, launches, calls.

    python -P benchmarks/host_work.py tests/pair --build old=/tmp/old --build new=/tmp/new \\
        --graft 'old={"eagle": {"topk": 4}}' --graft 'new={"tree": {"topk": 4}}'

It checks, without a GPU, a change that should cost the host nothing. A clock can't show this within
2 %, because two processes of the same build differ by up to 10 %. The numbers here are the same in
every run. Engines run on the CPU with recorded FULL graphs, one process per build. What a
replay does inside is left out, as on a GPU the host does not do it. Nothing here imports vllm_graft
but the build's own process.

The exit status is 1 if the second build's operators or launches are more than the first's, or its
Python calls by more than `--within`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

OUTSIDE = ("/triton/runtime/", "/vllm_graft/testing/")
"""Modules that stand for the device: Triton's interpreter, and recorded graphs."""

SAMPLE = "/worker/gpu/model_runner.py:sample_tokens"
"""The function that the model runner calls once per step."""


class HostWork:
    """Counts what happens in this thread, but for what happens inside `OUTSIDE`.

    Attributes:
        calls: Python calls by file and function.
        operators: calls of torch operators.
        launches: calls into `OUTSIDE`: kernels, and replays of graphs.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.operators = 0
        self.launches = 0
        self._outside: FrameType | None = None

    def __enter__(self) -> HostWork:
        from torch.utils._python_dispatch import TorchDispatchMode

        work = self

        class Operators(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                work.operators += work._outside is None
                return func(*args, **(kwargs or {}))

        self._mode = Operators()
        self._mode.__enter__()
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        self._mode.__exit__(*error)

    def _seen(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self._outside is None:
            path = frame.f_code.co_filename
            if any(part in path for part in OUTSIDE):
                self._outside = frame
                self.launches += 1
            else:
                self.calls[f"{path}:{frame.f_code.co_name}"] += 1
        elif event == "return" and frame is self._outside:
            self._outside = None

    def per_step(self) -> dict[str, float]:
        """Return the counts divided by the number of the engine's steps."""
        steps = sum(count for name, count in self.calls.items() if name.endswith(SAMPLE))
        totals = {
            "operators": self.operators,
            "launches": self.launches,
            "Python calls": sum(self.calls.values()),
        }
        return {name: total / steps for name, total in totals.items()}


def count(pair: Path, graft: dict[str, Any], temperature: float) -> dict[str, float]:
    """Serve one request twice on this process's build; return the second time's work per step."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm_graft.testing import cpu_engine, install

    install()  # before anything imports triton or vllm
    from vllm import SamplingParams

    draft = {"method": "eagle3", "model": str(pair / "eagle3"), "num_speculative_tokens": 15}
    prompts = json.loads((pair / "prompts.json").read_text())[:1]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True)
    with cpu_engine(
        str(pair / "target"),
        graphs=[4, 8, 16],
        speculative_config=draft,
        additional_config={"graft": graft},
        max_num_seqs=1,
        enable_prefix_caching=False,
    ) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        with HostWork() as work:
            llm.generate(prompts, params, use_tqdm=False)
        return work.per_step()


def count_in(site: str, given: argparse.Namespace, graft: str, temperature: float) -> Any:
    """Count the work of one build in a process of its own."""
    path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    with tempfile.NamedTemporaryFile("r") as result:
        asked = json.dumps([str(given.pair), json.loads(graft), temperature, result.name])
        subprocess.run(
            [sys.executable, "-P", __file__, "--count", asked],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(result.read())


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--count"]:
        pair, graft, temperature, result = json.loads(arguments[1])
        Path(result).write_text(json.dumps(count(Path(pair), graft, temperature)))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pair", type=Path, help="a folder with target, eagle3 and prompts.json")
    parser.add_argument("--build", action="append", required=True, help="NAME=FOLDER, two of them")
    parser.add_argument("--graft", action="append", required=True, help="NAME=JSON, one per build")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--within", type=float, default=0.01)
    given = parser.parse_args(arguments)
    sites = dict(each.split("=", 1) for each in given.build)
    grafts = dict(each.split("=", 1) for each in given.graft)
    if len(sites) != 2 or set(sites) != set(grafts):
        parser.error("name two builds, and a --graft for each")
    good = True
    for temperature in given.temperature:
        first, second = (
            count_in(site, given, grafts[name], temperature) for name, site in sites.items()
        )
        for name in first:
            allowed = 1 + given.within if name == "Python calls" else 1
            good &= second[name] <= first[name] * allowed
            numbers = " and ".join(f"{each[name]:.1f}" for each in (first, second))
            ratio = second[name] / first[name]
            print(f"T={temperature:g}: {name} per step {numbers}, ratio {ratio:.4f}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
