"""Answers of an engine of several tensor-parallel ranks, which runs in processes of its own.

    python -P -m tests.support.engines.rank_answers QUESTIONS ANSWERS

An engine with several ranks starts a process per rank, and vLLM wants a main module that it can
import again. So a test runs this module and reads what it wrote.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engines.cpu_replicas import REPLICAS, mend, on_all_ranks
from tests.support.engines.pairs import Answer, Request, answer_all

ROOT = Path(__file__).parents[3]

HURRIED = "GRAFT_TEST_HURRIED"
"""Environment variable: hot tokens are chosen in every other step."""

_EVERYWHERE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_ON_CPU = {
    "VLLM_GRAFT_INTERPRET": "1",
    # Ranks have processes; the engine needs none beside them, which would import all of it again.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_ON_CUDA = {
    "TRITON_F32_DEFAULT": "ieee",
    # It uses NVLink multicast, which not every host's GPUs may.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


@dataclass(frozen=True)
class Questions:
    """The options of an engine, and the requests that it gets in each round."""

    engine: dict[str, Any]
    requests: list[Request]
    rounds: int = 1


@dataclass(frozen=True)
class RankAnswers:
    """What an engine answered in each round, its metrics, and what each rank says of itself."""

    rounds: list[list[Answer]]
    metrics: dict[str, float]
    ranks: list[dict[str, Any]]


def _cause(log: str) -> str:
    """What a log says of a failure: errors, of which the first is a worker's, and the end."""
    errors = [line for line in log.splitlines() if "Error: " in line]
    return "\n".join([*errors[:4], "...", log[-3000:]])


def ask(
    folder: Path,
    questions: Questions,
    *,
    cuda: bool,
    seconds: int = 500,
    hurried: bool = False,
    environment: Mapping[str, str] | None = None,
) -> RankAnswers:
    """Run an engine in processes of its own, with more variables of the environment."""
    asked, answered = folder / "questions", folder / "answers"
    asked.write_bytes(pickle.dumps(questions))
    own = {
        name: text for name, text in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
    }
    environment = {**own, **_EVERYWHERE, **(_ON_CUDA if cuda else _ON_CPU), **(environment or {})}
    environment |= {HURRIED: "1"} if hurried else {}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-P", "-m", __name__, str(asked), str(answered)]
    log = folder / "engine.log"
    with log.open("w") as output:
        # A session of its own, so that the engine's processes end with it.
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            _end(process.pid)
    assert status == 0, _cause(log.read_text())
    found: RankAnswers = pickle.loads(answered.read_bytes())
    return found


def ask_replicas(
    folder: Path, questions: Sequence[Questions], *, cuda: bool, **options: Any
) -> list[RankAnswers]:
    """Run a data-parallel rank for each of the questions; they step together."""

    def one(own: Path, asked: Questions, environment: dict[str, str]) -> RankAnswers:
        return ask(own, asked, cuda=cuda, environment=environment, **options)

    return on_all_ranks(folder, one, questions)


def _end(group: int) -> None:
    import contextlib
    import signal

    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _answer(questions: Questions) -> RankAnswers:
    from vllm import LLM

    llm = LLM(**questions.engine)
    rounds = []
    for _ in range(questions.rounds):
        llm.reset_prefix_cache()
        rounds.append(answer_all(llm, questions.requests))
    metrics = {
        metric.name: float(value)
        for metric in llm.get_metrics()
        if isinstance(value := getattr(metric, "value", None), int | float)
    }
    ranks: list[dict[str, Any]] = []
    if questions.engine.keys() & {"additional_config", "kv_transfer_config"}:
        ranks = llm.collective_rpc("graft_info")
    return RankAnswers(rounds, metrics, ranks)


def _hurry() -> None:
    """Each process of an engine imports this module, and so comes here."""
    from vllm_graft.spec_decode.heads import hot_vocabulary

    hot_vocabulary.PERIOD, hot_vocabulary.LATE = 2, 1


if os.environ.get(HURRIED):
    _hurry()


if os.environ.get(REPLICAS) and os.environ.get("VLLM_GRAFT_INTERPRET"):
    from vllm_graft.seams.post_import import after_import

    after_import("vllm.distributed.device_communicators.cpu_communicator", mend)


def main() -> None:
    """Answer the questions of a file."""
    # The module by its own name, under which the test unpickles what it defines.
    from tests.support.engines import rank_answers

    if os.environ.get("VLLM_GRAFT_INTERPRET"):
        from tests.support.engines.quick_processes import save_time

        save_time()

    found = rank_answers._answer(pickle.loads(Path(sys.argv[1]).read_bytes()))
    written = Path(sys.argv[2])
    written.with_suffix(".part").write_bytes(pickle.dumps(found))
    written.with_suffix(".part").rename(written)


if __name__ == "__main__":
    main()
