"""Random configurations, mutated from good ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzz.config.mutations import Mutations


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


class Inputs(Mutations):
    """Makes inputs; the same seed and number make the same one.

    Args:
        seed: the seed of all inputs.
        root: a directory that configurations of stores may name.
    """

    def __init__(self, seed: int, root: Path) -> None:
        super().__init__()
        self.seed, self.root = seed, root

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
        memories = [{"bytes": "1MiB"}, {"scope": "server"}, {"scope": "all"}, {"prompts": 2}]
        ngrams = [{"min": 2}, {"max": "4"}, {"min": 17}, {"reference": 0}, {"reference": -1}]
        return self._some(
            topk=[1, 4, 8, "4", 32, 33],
            steps=[1, 6, "6", 32, 0],
            nodes=[None, 7, "15", 64],
            shape=["fixed", "auto", "Auto"],
            fallback=["chain", "refuse", "tree"],
            recurrent=[None, False, True, "on"],
            recurrent_form=["auto", "states", "inputs", "both", 1],
            coupled=[True, False, "yes"],
            attention=["auto", "triton", "flash", "fa3"],
            mixed_graphs=[None, True, False],
            fit_graphs=[True, False, None, "maybe"],
            fit_prompts=[True, False, None, "maybe"],
            hot_tokens=hot,
            learn_salted=[True, False, None, "no"],
            head_dtype=["auto", "fp8", "FP8"],
            draft_window=[64, None, 1, "2048", 1 << 20, 0, -1, (1 << 20) + 1, 1.5, True],
            ngram=[None, True, False, "auto", "tru", 3, {}, *ngrams],
            memory=[None, True, False, "auto", 64, {}, *memories],
            drafter=["target_dependent", "three", ""],
            policy=["dynamic", "dinamic"],
            graph_runner=["cuda_graph", "verify", "eager", "lazy"],
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
            eviction=["lru", "arc", "fifo", ""],
            load=["auto", "async", "layerwise", "recompute", "lazy"],
            kv_layout=[None, "LBHNC", "BLHNC", "NHD"],
            host_dtype=[None, "fp8", "packed", "fp4"],
            staging_bytes=[0, "48MiB", -1, "many"],
            storage=[self._storage],
            prefetch=[self._prefetch],
            weights=[None, "r1", "", "w" * 5000],
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
        storage = self._some(
            backend=["segments", "nope", None, 3],
            path=[self._path],
            max_bytes=[lambda: self._size("8MiB", "1GiB", 1 << 20), 0, "5EiB"],
            share=0.98,
        )
        storage |= self._some(segment_bytes=["64KiB", None, "8MiB", 1], sync_bytes=["1MiB", 0, -1])
        return self._spoilt(storage, 0.15)

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
