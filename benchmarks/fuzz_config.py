"""Put random configurations, mutated from good ones, through the frontend's whole validation.

    python -m benchmarks.fuzz_config --inputs 10000 --seed 7

Each input is a value of ``additional_config`` and one of ``kv_connector_extra_config``, as the
Python API takes them: misspelt and misplaced keys, wrong types, numbers that are none, bytes, texts
that no terminal shows, connectors below ``MultiConnector``. Nothing but a `ConfigError` may come
out, whose message names the full flag; what is accepted has to be read alike in another process,
and its store, policy and injector have to be made. No model is loaded. An input that is judged
wrongly is printed with the number that makes it again (``--only``), and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_graft import activation
from vllm_graft.base.errors import ConfigError
from vllm_graft.config import GraftConfig
from vllm_graft.hicache.cache_refusals import parse_connectors
from vllm_graft.hicache.planning.cost import CostModel
from vllm_graft.misplaced import can_only_be_ours
from vllm_graft.spec_decode.tuning.shapes import auto_schedule
from vllm_graft.testing.models.llama import write_configs

FLAGS = ("--additional-config.", "--kv-transfer-config.")
LONGEST = 8000


@dataclass
class Case:
    """One input.

    Attributes:
        additional: ``additional_config``.
        connector: ``kv_connector``; None for no transfer configuration.
        extra: ``kv_connector_extra_config``.
    """

    additional: Any = field(default_factory=dict)
    connector: str | None = None
    extra: Any = field(default_factory=dict)


class Inputs:
    """Makes inputs; the same seed and number make the same one.

    Args:
        seed: the seed of all inputs.
        root: a directory that configurations of stores may name.
    """

    def __init__(self, seed: int, root: Path) -> None:
        self.seed, self.root = seed, root
        self.random = random.Random()
        self.care = 0.0

    def make(self, number: int) -> Case:
        """Make the input of a number."""
        self.random.seed(f"{self.seed} {number}")
        # An input with every mistake at once would never reach the later checks.
        self.care = self._pick(0.3, 0.8, 1.0)
        case = Case(additional=self._additional())
        if self._chance(0.6):
            case.connector, case.extra = "HiCacheConnector", self._extra()
            if self._chance(0.3):
                case.connector, case.extra = "MultiConnector", self._children(case.extra)
        return case

    def _chance(self, share: float) -> bool:
        return self.random.random() < share

    def _slips(self, share: float) -> bool:
        return self._chance(share * (1 - self.care))

    def _pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    # --- additional_config ------------------------------------------------------------------

    def _additional(self) -> Any:
        if self._chance(0.15):
            return {}
        graft = self._graft()
        additional = {"graft": graft}
        if self._slips(0.4):
            additional = {self._spelling(): self._pick(graft, self._section(), self._junk())}
        if self._slips(0.3):
            additional[self._spelling()] = self._pick(self._section(), self._junk())
        if self._chance(0.1):
            additional[self._pick(1, None, b"graft", "other", "kda_prefill_backend")] = "x"
        return additional

    def _graft(self) -> Any:
        if self._slips(0.1):
            return self._junk()
        if self._chance(0.1):
            return self._pick("auto", "latency", "throughput", "auto ", "on")
        parts = {"tree": self._tree, "vit": self._vit, "draft": self._draft}
        # A machine without CUDA graphs refuses the two others at once, and checks nothing more.
        names = [name for name in parts if self._chance(0.9 if name == "tree" else 0.25)]
        graft: dict[Any, Any] = {name: self._spoilt(parts[name]()) for name in names}
        if self._slips(0.1):
            decided = {"preset": "auto", "on": {"tree": "x"}, "off": {}, "before": {"tree": {}}}
            graft["decided"] = self._spoilt(decided, 0.3)
        return self._spoilt(graft, 0.1)

    def _section(self) -> Any:
        return self._pick(self._tree, self._vit, self._draft, self._extra)()

    def _spelling(self) -> Any:
        part = self._pick("tree", "vit", "draft", "hicache", "tre", "")
        key = self._pick("topk", "memory", "extend", "host_bytes", "")
        top = self._pick("graft", "Graft", "GRAFT", "graff", "vllm_graft", "")
        text = self._pick(".", "_", "-", ":", " ").join(filter(None, [top, part, key]))
        return text or "graff"

    def _tree(self) -> dict[Any, Any]:
        hot: list[Any] = [None, 16, "16", str(self.root / "hot.json"), str(self.root / "hot.txt")]
        hot += ["missing.json", "a.bin", str(self.root), "9" * 5000, "x\0.json", "~/hot.txt"]
        return self._some(
            topk=[1, 4, 8, "4", 32, 33],
            steps=[1, 6, "6", 32, 0],
            nodes=[None, 7, "15", 64],
            shape=["fixed", "auto", "Auto"],
            fallback=["chain", "refuse", "tree"],
            check_ranks=[False, True, 1],
            compile_processes=[None, 0, 4, 65],
            recurrent=[False, True, "on"],
            recurrent_form=["auto", "states", "inputs", "both", 1],
            coupled=[True, False, "yes"],
            attention=["auto", "triton", "flash", "fa3"],
            mixed_graphs=[None, True, False],
            fit_graphs=[True, False, None, "maybe"],
            hot_tokens=hot,
            head_dtype=["auto", "fp8", "FP8"],
            draft_window=[64, None, 1, "2048", 1 << 20, 0, -1, (1 << 20) + 1, 1.5, True],
            ngram=[
                None,
                True,
                False,
                "auto",
                "tru",
                3,
                {},
                {"min": 2},
                {"max": "4"},
                {"min": 17},
                {"reference": 0},
                {"reference": -1},
            ],
            drafter=["target_dependent", "three", ""],
            policy=["dynamic", "dinamic"],
            graph_runner=["cuda_graph", "exact", "verify", "eager", "lazy"],
        )

    def _vit(self) -> dict[Any, Any]:
        return self._some(
            runner=["cuda_graph", "none"],
            memory=[32, 512, "64", 31, 1 << 40],
            verify=[True, False],
            fuse=[None, True],
            min_hits=[1, 2, 1001],
            max_patches=[None, 64, 65536, 63],
            buckets=[None, [], [128, 256], [0], [-1], [1 << 70], "128"],
            capture_share=[0, 1, 0.5, "0.1", 1.5, float("nan"), "nan"],
        )

    def _draft(self) -> dict[Any, Any]:
        return self._some(extend=[True, False, "maybe"], graph_runner=["cuda_graph", "eager", 7])

    # --- kv_connector_extra_config ----------------------------------------------------------

    def _extra(self) -> Any:
        extra = self._some(
            write_policy=["write_through", "write_back", "write_through_selective", "never"],
            write_after=[1, 2, 0, "3"],
            eviction=["lru", "lfu", "arc", "cost_aware", "fifo", ""],
            load=["auto", "async", "layerwise", "recompute", "lazy"],
            kv_layout=[None, "LBHNC", "BLHNC", "NHD"],
            host_dtype=[None, "fp8", "fp4"],
            staging_bytes=[0, "48MiB", -1, "many"],
            storage=[self._storage],
            prefetch=[self._prefetch],
            cost=[self._cost],
            weights=[None, "r1", "", "w" * 5000],
            copy_delay_cycles=[0, 100, -1],
            faults=[self._faults],
            kv_load_failure_policy=["fail", "recompute"],
        )
        if not self._slips(0.1):
            sizes = (1, "1EB", "1e9", None) if self._slips(0.5) else ("64MiB", 1 << 26)
            extra["host_bytes"] = self._size(*sizes)
        return self._spoilt(extra, 0.2)

    def _size(self, *values: Any) -> Any:
        odd: list[Any] = ["64 GiB of it", "9" * 400 + "B", float("inf"), 1.5, b"1", True]
        odd += ["-1", "٣", "1 bit"]
        return self._pick(*odd) if self._slips(0.3) else self._pick(*values)

    def _path(self) -> Any:
        inside = self.root / f"store{self.random.randrange(4)}"
        file = self.root / "hot.txt"
        odd: list[Any] = ["", " ", "~/x", "~nobody/x", "relative/x", str(file), str(file / "x")]
        odd += ["a\0b", "\udc80", "x" * 300, "x/" * 3000, "/proc/x", 7, None, b"x", [str(inside)]]
        return self._pick(*odd) if self._slips(0.8) else self._pick(str(inside), inside)

    def _storage(self) -> Any:
        if self._slips(0.1):
            return self._junk()
        backend = self._pick("segments", "segments", "file", "vllm_tier")
        storage = self._some(
            backend=[backend, "nope", None, 3],
            path=[self._path],
            max_bytes=[lambda: self._size("8MiB", "1GiB", 1 << 20), 0, "5EiB"],
            share=0.98,
        )
        if backend == "segments":
            storage |= self._some(
                segment_bytes=["64KiB", None, "8MiB", 1], sync_bytes=["1MiB", 0, -1]
            )
        if storage.get("backend") == "vllm_tier":
            storage = self._some(
                backend=["vllm_tier"],
                tier=[{"type": "fs"}, {"type": "what"}, {}, {"type": 3}, "fs"],
                page_bytes=[lambda: self._size("64KiB", 1, "1EB")],
                slots=[1, 16, 0, 5000],
                timeout_seconds=[1, 0, float("inf")],
                share=0.95,
            )
        return self._spoilt(storage, 0.15)

    def _faults(self) -> Any:
        return self._spoilt(
            self._some(
                seed=[0, 1, "x", 1 << 80],
                rate=[0, 0.01, 1, 2, float("nan")],
                kinds=[[], ["slow"], ["corrupt", "failing"], ["flood"], "slow", ["slow", 1]],
                slow_seconds=[0, 0.1, 61, None],
            )
        )

    def _prefetch(self) -> Any:
        return self._spoilt(
            self._some(
                policy=["best_effort", "wait_complete", "timeout", "soon"],
                base_seconds=[0, 1, 601, "1"],
                seconds_per_1k_tokens=[0, 0.25, -1],
                max_seconds=[0, 20, True],
                max_share=[0.5, 1, 0, 1e-300],
                threads=[1, 4, 257, 1.5],
            )
        )

    def _cost(self) -> Any:
        rates = [20, "2.5", 5e-324, 1e308, 0, float("inf"), "inf", "nan", -1]
        return self._spoilt(
            self._some(host_gbps=rates, disk_gbps=rates, prefill_tokens_per_second=rates)
        )

    def _children(self, extra: Any) -> Any:
        """Make children of a ``MultiConnector``: ours, others, and no connectors at all."""
        children: list[Any] = [
            {
                "kv_connector": "HiCacheConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": self._pick(extra, self._extra()),
            }
            for _ in range(self._pick(1, 1, 2))
        ]
        children.append({"kv_connector": "ExampleConnector", "kv_role": "kv_both"})
        if self._slips(0.2):
            children.append(self._junk())
        if self._slips(0.2):
            children[0].pop("kv_connector_extra_config")
        if self._chance(0.1):
            nested = {"connectors": children}
            children = [{"kv_connector": "MultiConnector", "kv_connector_extra_config": nested}]
        self.random.shuffle(children)
        return {"connectors": children}

    # --- mutations --------------------------------------------------------------------------

    def _some(self, share: float = 0.3, **choices: list[Any]) -> dict[Any, Any]:
        """Choose some keys, each with one of its values (or a function's), mostly the first."""
        found = {
            key: self._pick(*values) if self._slips(0.8) else values[0]
            for key, values in choices.items()
            if self._chance(share)
        }
        return {key: value() if callable(value) else value for key, value in found.items()}

    def _spoilt(self, values: Any, share: float = 0.15) -> Any:
        """Return the mapping, or one with a key too many, a misspelt key, or junk as a value."""
        if not isinstance(values, dict) or not self._slips(2 * share):
            return values
        values, known = dict(values), list(values)
        way = self.random.randrange(3)
        if way == 0 or not known:
            values[self._odd_key()] = self._junk()
        elif way == 1:
            key = self._pick(*known)
            values[f"{key}{self._pick('s', '.x', ' ', chr(10))}"] = values.pop(key)
        else:
            values[self._pick(*known)] = self._junk()
        return values

    def _odd_key(self) -> Any:
        odd = [1, None, 2.5, True, (1, 2), b"topk", "", "eagle.topk", "\udc80", "a\0b", "k" * 5000]
        return self._pick(*odd, "fröhlich", "\n\x1b[31m", "topkk", "-1", "__class__")

    def _junk(self, depth: int = 0) -> Any:
        scalars: list[Any] = [
            None,
            True,
            0,
            -1,
            1 << 62,
            1 << 200,
            10**5000,
            0.5,
            float("nan"),
            -float("inf"),
        ]
        scalars += ["", "x", "true", "\0", "\udc80", "\x1b[2J", "x" * 100_000, b"x", 1j, object()]
        scalars += [{1, 2}, Path("x"), range(3), Exception("x"), int, print]
        if depth < 3 and self._chance(0.3):
            return [self._junk(depth + 1) for _ in range(self.random.randrange(3))]
        if depth < 3 and self._chance(0.3):
            return {self._odd_key(): self._junk(depth + 1) for _ in range(self.random.randrange(3))}
        if self._chance(0.05):
            deep: Any = []
            for _ in range(5000):
                deep = [deep]
            return deep
        return self._pick(*scalars)


class Frontend:
    """The validation of a configuration in vLLM's frontend, for a model without weights.

    Args:
        root: a directory to write the models' configurations to.
    """

    def __init__(self, root: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.models import registry

        activation.install()
        target, draft = write_configs(root)
        self._arguments = EngineArgs(
            model=str(target),
            speculative_config={
                "method": "eagle3",
                "model": str(draft),
                "num_speculative_tokens": 7,
            },
            skip_tokenizer_init=True,
        )
        # vLLM would inspect each model's class in a child process, which takes seconds.
        with mock.patch.object(registry, "_run_in_subprocess", lambda fn: fn()):
            self._config = self._arguments.create_engine_config()

    def quick(self, case: Case) -> Any:
        """Run our part of the validation on a copy of a ready configuration; return the copy.

        Raises:
            ConfigError: the input is refused.
        """
        config = copy.copy(self._config)
        config.additional_config = case.additional
        config.kv_transfer_config = _transfer(case)
        config.parallel_config = copy.copy(self._config.parallel_config)
        config.compilation_config = copy.copy(self._config.compilation_config)
        config.speculative_config = copy.copy(self._config.speculative_config)
        activation.on_defaults(config)
        activation.on_config(config)
        return config

    def whole(self, case: Case) -> Any:
        """Run the frontend's whole validation."""
        arguments = copy.copy(self._arguments)
        arguments.additional_config = case.additional
        arguments.kv_transfer_config = _transfer(case)
        return arguments.create_engine_config()


def vllm_reads(case: Case) -> bool:
    """Return whether vLLM itself accepts the shape of the input before it asks us."""
    if case.connector != "MultiConnector":
        return True
    children = case.extra["connectors"]
    names = ("HiCacheConnector", "ExampleConnector")
    return all(isinstance(one, dict) and one.get("kv_connector") in names for one in children)


def _transfer(case: Case) -> Any:
    from vllm.config import KVTransferConfig

    if case.connector is None:
        return None
    transfer = KVTransferConfig(kv_connector=case.connector, kv_role="kv_both")
    # It is set afterwards: as an argument, vLLM itself would refuse keys that are no text.
    transfer.kv_connector_extra_config = case.extra
    return transfer


def problem_of(case: Case, check: Callable[[Case], Any], root: Path) -> str | None:
    """Say in a sentence what is wrong with how an input is judged; None if nothing is.

    Raises:
        ConfigError: the input is rightly refused.
    """
    try:
        config = check(case)
    except ConfigError as error:
        if wrong := wrong_message(str(error)):
            return f"{wrong}: {str(error)[:500]!r}"
        raise
    except BaseException as error:
        return f"{type(error).__name__} came out: {str(error)[:500]}"
    if isinstance(case.additional, dict):
        for key, value in case.additional.items():
            if isinstance(key, str) and key != "graft" and can_only_be_ours(key, value):
                return f"the key {key!r} was accepted"
    try:
        build(case, config, root)
    except BaseException as error:
        return f"accepted, and then {type(error).__name__}: {str(error)[:500]}"
    return None


def wrong_message(text: str) -> str | None:
    """Say what is wrong with the message of an error."""
    if not text.startswith(FLAGS):
        return "the message does not begin with the full flag"
    if "Traceback" in text or 'File "' in text:
        return "the message holds a traceback"
    if not all(line.isprintable() for line in text.split("\n")):
        return "the message can't be printed"
    return "the message is too long" if len(text) > LONGEST else None


def build(case: Case, config: Any, root: Path) -> None:
    """Read an accepted input as a worker does, and build all parts that need no model."""
    from vllm_graft.hicache import setup

    if isinstance(case.additional, dict) and "graft" in case.additional:
        parsed = GraftConfig.from_vllm(config)
        assert parsed is not None
        # Depths and presets are replaced by what they stand for.
        values = json.loads(json.dumps(config.additional_config["graft"], sort_keys=True))
        assert GraftConfig.parse(values) == parsed
        assert pickle.loads(pickle.dumps(parsed)) == parsed
        if parsed.tree is not None:
            auto_schedule(parsed.tree, config.speculative_config.num_speculative_tokens, 256)
    connectors = parse_connectors(config)
    again = copy.copy(config)
    again.kv_transfer_config = pickle.loads(pickle.dumps(config.kv_transfer_config))
    assert parse_connectors(again) == connectors
    for _, one in connectors:
        setup.make_policy(one.eviction, 8)
        setup.make_injector(one)
        model = CostModel(
            one.cost.host_gbps, one.cost.disk_gbps, one.cost.prefill_tokens_per_second
        )
        assert model.seconds_to_load(1 << 30) > 0 < model.seconds_to_compute(1000)
        # A tier of vLLM's has keys of its own, which only it can check.
        if one.storage is not None and one.storage["backend"] != "vllm_tier":
            setup.make_backend(one.model_copy(update={"faults": None}), bytes(16)).close()
            for store in root.glob("store*"):
                shutil.rmtree(store)


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
