"""Answers of an engine of several tensor-parallel ranks, which runs in processes of its own.

    python -P -m tests.support.engines.rank_answers QUESTIONS.json ANSWERS.json

An engine with several ranks starts a process per rank, and vLLM wants a main module that it can
import again. So a test runs this module and reads what it wrote.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

HURRIED = "GRAFT_TEST_HURRIED"
"""Environment variable: hot tokens are chosen in every other step, and kernels are quick."""

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
class RankAnswers:
    """What an engine answered."""

    rounds: list[list[list[int]]]
    cached: list[list[int]]
    metrics: dict[str, float]
    ranks: list[dict[str, Any]]


def ask(
    folder: Path,
    questions: dict[str, Any],
    *,
    cuda: bool,
    seconds: int = 500,
    hurried: bool = False,
) -> RankAnswers:
    """Run an engine in processes of its own."""
    asked, answered = folder / "questions.json", folder / "answers.json"
    asked.write_text(json.dumps(questions))
    own = {
        name: text for name, text in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
    }
    environment = {**own, **_EVERYWHERE, **(_ON_CUDA if cuda else _ON_CPU)}
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
    assert status == 0, log.read_text()[-4000:]
    return RankAnswers(**json.loads(answered.read_text()))


def _end(group: int) -> None:
    import contextlib
    import signal

    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _answer(questions: dict[str, Any]) -> RankAnswers:
    from vllm import LLM, SamplingParams

    llm = LLM(**questions["engine"])
    prompts = [request["prompt"] for request in questions["requests"]]
    params = [
        SamplingParams(ignore_eos=True, **request["params"]) for request in questions["requests"]
    ]
    rounds, cached = [], []
    for _ in range(questions["rounds"]):
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        rounds.append([list(output.outputs[0].token_ids) for output in outputs])
        cached.append([output.num_cached_tokens or 0 for output in outputs])
    metrics = {
        metric.name: float(value)
        for metric in llm.get_metrics()
        if isinstance(value := getattr(metric, "value", None), int | float)
    }
    ranks: list[dict[str, Any]] = llm.collective_rpc("graft_info")
    return RankAnswers(rounds, cached, metrics, ranks)


def _hurry() -> None:
    """Each process of an engine imports this module, and so comes here."""
    from vllm_graft.spec_decode.heads import hot_vocabulary

    hot_vocabulary.PERIOD, hot_vocabulary.LATE = 2, 1
    if os.environ.get("VLLM_GRAFT_INTERPRET"):
        from tests.support.engines.quick_kernels import quicken

        quicken()


if os.environ.get(HURRIED):
    _hurry()


def main() -> None:
    """Answer the questions of a file."""
    import dataclasses

    found = _answer(json.loads(Path(sys.argv[1]).read_text()))
    written = Path(sys.argv[2])
    written.with_suffix(".part").write_text(json.dumps(dataclasses.asdict(found), default=str))
    written.with_suffix(".part").rename(written)


if __name__ == "__main__":
    main()
