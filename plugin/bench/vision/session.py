"""One run of the benchmark: the order of its sections, and what they print."""

from __future__ import annotations

import argparse
import contextlib
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from vllm_graft.bench.common.report import (
    BenchmarkError,
    Panel,
    plot,
    require_folder,
    require_plotting,
    write_json,
)
from vllm_graft.bench.common.timing import Deadline
from vllm_graft.bench.vision import failures, matrix, speed, stream
from vllm_graft.bench.vision import image_cases as cases
from vllm_graft.bench.vision.arms import Arm, Machine, make
from vllm_graft.bench.vision.arms import ours as load_ours
from vllm_graft.bench.vision.random_towers import (
    TOWERS,
    Limits,
    Pixels,
    Tower,
    build,
    one_rank,
    tiny,
)
from vllm_graft.bench.vision.random_towers import vllm_config as engine_config

WEIGHTS = {"speed": 4.0, "stream": 4.0, "memory": 1.0, "matrix": 3.0, "failures": 2.0}
"""Share of the time that a section may take."""

_MOST_PATCHES = 32768


class Session:
    """Runs the sections, each on every tower.

    Attributes:
        report: content of the JSON file: a list of rows for each section, and ``failed``.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        require_plotting(arguments.plot)
        require_folder("--json", arguments.json)
        if arguments.device == "cpu" and not arguments.tiny:
            raise BenchmarkError("--device cpu: add --tiny; a tower of true shapes takes hours")
        self.arguments = arguments
        self.report: dict[str, Any] = {"arguments": _plain(arguments), "failed": []}
        self.deadline = Deadline(None)
        self.machine = _machine(arguments)
        self._models: dict[tuple[str, bool], Any] = {}
        self._pixels: dict[str, Pixels] = {}
        self._left = len(arguments.towers) * sum(WEIGHTS[name] for name in arguments.sections)

    def run(self) -> int:
        """Run all sections on all towers; the exit status is 1 if one of them raised."""
        with contextlib.ExitStack() as stack:
            if self.arguments.device == "cpu":
                from vllm_graft.bench.vision.standins import cpu
                from vllm_graft.testing import torchvision_import

                torchvision_import.install()
            stack.enter_context(one_rank())
            if self.arguments.device == "cpu":
                stack.enter_context(cpu())
            if any(kind.startswith("ours") for kind in self.arguments.arms):
                load_ours(self.machine.runner)
            self.report["device"] = _device_name(self.arguments.device)
            print(self.report["device"], flush=True)
            self.report["attention"] = {}
            self.deadline = Deadline(self.arguments.seconds)
            for section in self.arguments.sections:
                for name in self.arguments.towers:
                    tower = tiny(TOWERS[name]) if self.arguments.tiny else TOWERS[name]
                    self._section(section, tower)
        if self.arguments.json:
            write_json(self.arguments.json, self.report)
        if self.arguments.plot:
            plot(self.arguments.plot, panels(self.report))
        return 1 if self.report["failed"] else 0

    def _section(self, section: str, tower: Tower) -> None:
        self.tower = tower
        steps: dict[str, Callable[[Deadline], None]] = {
            "speed": self._speed,
            "stream": self._stream,
            "memory": self._memory,
            "matrix": self._matrix,
            "failures": self._failures,
        }
        self._left -= WEIGHTS[section]
        print(f"\n## {tower.name}: {section}\n", flush=True)
        with self._going_on(f"{tower.name} {section}"):
            self._load_tower()
            steps[section](self.deadline.share(WEIGHTS[section], self._left))
        self._write()

    @contextlib.contextmanager
    def _going_on(self, task: str) -> Iterator[None]:
        """Report an exception that is raised in here; only the exit status of the run changes."""
        try:
            yield
        except Exception as raised:
            traceback.print_exc()
            self.report["failed"].append(f"{task}: {raised!r}")

    def _write(self) -> None:
        if self.arguments.json:
            write_json(self.arguments.json, self.report, quiet=True)

    def _load_tower(self) -> None:
        name, machine = self.tower.name, self.machine
        if name not in self._pixels:
            found = Pixels(self.tower, _MOST_PATCHES, machine.device, machine.dtype)
            self._pixels[name] = found
            backend = str(self._model("eager").visual.attn_backend)
            self.report["attention"][name] = backend
            print(f"{name}: {backend}\n", flush=True)
        self.pixels = self._pixels[name]

    def _warm_up(self, model: Any) -> None:
        """Load and compile kernels, as an engine's profile run does, before arms and captures.

        It takes several sizes, because torch.compile makes a size dynamic when it has seen two.
        """
        eager = Arm("eager", model, self.machine)
        sizes = (64, 96, 112) if self.arguments.tiny else (224, 448, 896)
        for batch in cases.single_sizes(self.tower.patch, sizes).values():
            eager.finished(self._pixels[self.tower.name].of(batch))

    def _model(self, kind: str) -> Any:
        """Return the tower; arms that compile share another one, kept once it has compiled."""
        key = self.tower.name, kind.endswith("+compile")
        if key not in self._models:
            machine = self.machine
            config = engine_config(machine.limits, None, key[1], machine.dtype, self.tower)
            model = build(self.tower, config, machine.device, machine.dtype)
            # A tower whose compilation has failed does not compile again, and hides the reason.
            self._warm_up(model)
            self._models[key] = model
        return self._models[key]

    def _make(self, kind: str) -> Arm:
        return make(kind, self._model(kind), self.machine)

    def _keep(self, section: str, *rows: Any) -> None:
        self.report.setdefault(section, []).extend(asdict(row) for row in rows)
        self._write()

    def _speed(self, deadline: Deadline) -> None:
        arguments, patch = self.arguments, self.tower.patch
        arms: list[Arm] = []
        for kind in arguments.arms:
            with self._going_on(f"{self.tower.name} speed, {kind}"):
                arms.append(self._make(kind))
        _print_row(speed.header([arm.name for arm in arms]), head=True)
        batches = {**cases.single_sizes(patch), **cases.several(patch)}
        if arguments.tiny:
            batches = {**cases.single_sizes(patch, (64, 112)), **cases.several(patch, (4,), 64)}
        for name, batch in batches.items():
            if deadline.passed:
                print(f"out of time before {name}", flush=True)
                break
            with self._going_on(f"{self.tower.name} speed, {name}"):
                self._speed_of(name, batch, arms, deadline)
        self._close(arms)

    def _speed_of(
        self, name: str, batch: cases.Batch, arms: Sequence[Arm], deadline: Deadline
    ) -> None:
        rows = speed.measure(
            self.tower.name,
            name,
            batch.patches,
            arms,
            self.pixels.of(batch),
            self.arguments.blocks,
            self.arguments.per_block,
            self.arguments.warm,
            deadline,
        )
        self._keep("speed", *rows)
        _print_row(speed.line(rows))

    def _failures(self, deadline: Deadline) -> None:
        _print_row(failures.HEADER, head=True)
        for failure in failures.cases(self.tower.patch, self.machine.limits):
            for kind in self._graphed():
                if deadline.passed:
                    print(f"out of time before {failure.name}, {kind}", flush=True)
                    return
                row = failures.try_case(
                    self.tower.name,
                    failure,
                    kind,
                    self._model(kind),
                    self.machine,
                    self.pixels,
                )
                self._keep("failures", row)
                _print_row(row.cells())

    def _matrix(self, deadline: Deadline) -> None:
        if "ours" not in self.arguments.arms:
            return
        # Captures are made as soon as they are due, so that the exact tier has its share.
        eager = self._make("eager")
        machine = replace(self.machine, graft={"capture_share": 1.0, **self.machine.graft})
        ours = make("ours", self._model("ours"), machine)
        count = -(-self.arguments.matrix // len(self.arguments.towers))
        cap = 512 if self.arguments.tiny else 8192
        batches = cases.matrix(count, self.tower.patch, cap, self.arguments.seed)
        found = matrix.compare(self.tower.name, eager, ours, batches, self.pixels, deadline)
        self._keep("matrix", found)
        _print_row(matrix.HEADER, head=True)
        for cells in found.lines():
            _print_row(cells)
        print(f"\n{len(found.crashes)} crashes; batches: {found.kinds}", flush=True)
        for crash in found.crashes[:5]:
            print(f"  {crash}", flush=True)
        print(f"counters: {ours.statistics()}", flush=True)
        self._close([ours])

    def _stream(self, deadline: Deadline) -> None:
        requests = self._requests(self.arguments.stream)
        _print_row(stream.HEADER, head=True)
        ours: stream.StreamRow | None = None
        # Ours runs first, so that kernels which other arms load can't help it.
        order = sorted(self.arguments.arms, key=lambda kind: not kind.startswith("ours"))
        for number, kind in enumerate(order):
            part = requests[: self.arguments.stream_eager] if "eager" in kind else requests
            limit = deadline.share(1, len(order) - number - 1)
            with self._going_on(f"{self.tower.name} stream, {kind}"):
                row = self._stream_arm(kind, part, limit, self.machine)
                ours = ours or (row if kind == "ours" else None)
                self._keep("stream", row)
                _print_row(stream.line(row, ours))
                if row.statistics:
                    print(f"counters of {kind}: {row.statistics}", flush=True)

    def _stream_arm(
        self, kind: str, requests: Sequence[cases.Batch], limit: Deadline, machine: Machine
    ) -> stream.StreamRow:
        model = self._model(kind)
        return stream.run(self.tower.name, kind, model, machine, requests, self.pixels, limit)

    def _memory(self, deadline: Deadline) -> None:
        if "ours" not in self.arguments.arms:
            return
        requests = self._requests(self.arguments.memory_requests)
        _print_row(MEMORY_HEADER, head=True)
        for number, budget in enumerate(self.arguments.memory):
            machine = replace(self.machine, graft={**self.machine.graft, "memory": budget})
            limit = deadline.share(1, len(self.arguments.memory) - number - 1)
            with self._going_on(f"{self.tower.name} memory, {budget} MiB"):
                row = self._stream_arm("ours", requests, limit, machine)
                self.report.setdefault("memory", []).append({"budget": budget, **asdict(row)})
                self._write()
                _print_row(memory_line(row, budget))
                print(f"counters: {row.statistics}", flush=True)

    def _requests(self, count: int) -> list[cases.Batch]:
        if self.arguments.tiny:
            return cases.natural_stream(self.tower.patch, count, grids=6, largest=168)
        return cases.natural_stream(self.tower.patch, count)

    def _graphed(self) -> list[str]:
        return [kind for kind in self.arguments.arms if not kind.startswith("eager")]

    def _close(self, arms: Sequence[Arm]) -> None:
        for arm in arms:
            stream.clear(arm)


MEMORY_HEADER = (
    "tower",
    "budget MiB",
    "held MiB",
    "within",
    "counted MiB",
    "requests",
    "exact, bucket, eager",
)


def memory_line(row: stream.StreamRow, budget: int) -> list[str]:
    """Lay out the row of a budget: memory of the allocator, our count, and who answered."""
    served = row.statistics.get("items", {})
    tiers = [str(served.get(tier, 0)) for tier in ("exact", "bucket", "eager")]
    return [
        row.tower,
        str(budget),
        f"{row.bytes / 2**20:.1f}",
        "yes" if row.bytes <= budget << 20 else "NO",
        f"{row.statistics.get('bytes', 0) / 2**20:.1f}",
        str(row.requests),
        ", ".join(tiers),
    ]


def panels(report: dict[str, Any]) -> list[Panel]:
    """Make the diagrams: milliseconds over patches, and the stream's time over requests."""
    found = []
    for tower in report["arguments"]["towers"]:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in report.get("speed", ()):
            if row["tower"] == tower and " x " not in row["workload"]:
                series.setdefault(row["arm"], []).append((row["patches"], row["median"]))
        if series:
            found.append(Panel(f"{tower}, one image", "patches", "ms per call", series, "xy"))
        series = {}
        for row in report.get("stream", ()):
            if row["tower"] == tower:
                series[row["arm"]] = [(number, time) for number, time in row["cumulative"]]
        if series:
            found.append(Panel(f"{tower}, natural sizes", "requests", "seconds", series))
    return found


def _print_row(cells: Sequence[str], head: bool = False) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)
    if head:
        print("|" + "---|" * len(cells), flush=True)


def _machine(arguments: argparse.Namespace) -> Machine:
    import torch

    try:
        graft = json.loads(arguments.graft)
    except json.JSONDecodeError as error:
        raise BenchmarkError(f"--graft {arguments.graft!r} is not JSON: {error}") from error
    if not isinstance(graft, dict):
        raise BenchmarkError(f"--graft {arguments.graft!r} must be a mapping")
    limits = Limits(128, 128) if arguments.tiny else Limits()
    if arguments.tiny:
        graft = {"max_patches": 512, "buckets": [128, 256, 512], **graft}
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    return Machine(arguments.device, dtype, limits, graft, arguments.runner)


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name != "command"}


def _device_name(device: str) -> str:
    import torch

    if device == "cpu":
        return "CPU, recorded graphs: times mean nothing"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
