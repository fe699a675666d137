"""Small runs of training: a job for the tests' own target, and the texts that it answers."""

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.train.job import Job
from vllm_graft.train.target import Target
from vllm_graft.train.training import Training


def target_of(model: Path) -> Target:
    """What training reads of a checkpoint."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_graft.plan.request import inspecting

    with inspecting():
        return Target.of(EngineArgs(str(model)).create_model_config())


def job_of(folder: Path, model: Path = SHIPPED / "target", **settings: Any) -> Job:
    """A job that takes seconds; its texts are prompts of the tests' own pair."""
    file = folder / "texts.jsonl"
    prompts = json.loads((SHIPPED / "prompts.json").read_text())[:28]
    file.write_text("".join(json.dumps({"text": each}) + "\n" for each in prompts))
    small: dict[str, Any] = {
        "max_tokens": 40,
        "longest": 128,
        "draft_vocab": 400,
        "passes": 3,
        "batch_tokens": 512,
        "rate": 3e-3,
        "steps": 120,
        "answer_minutes": 5.0,
        "disk_bytes": 2**30,
    }
    job = Job(
        str(model),
        (str(file),),
        str(folder / "head"),
        str(folder / "states"),
        target=target_of(model),
        **{**small, **settings},
    )
    job.save()
    return job


def answered(job: Job) -> None:
    from vllm_graft.testing import cpu_engine
    from vllm_graft.train.target_answers import answer_all, engine_options

    with cpu_engine(job.model, **engine_options(job)) as llm:
        answer_all(llm, job)


@contextmanager
def one_thread() -> Iterator[None]:
    """Products this small are faster without threads, which wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def begun(job: Job, out: Path) -> Training:
    """Training of a job in a folder of its own, or what goes on there."""
    job = dataclasses.replace(job, out=str(out))
    job.save()
    return Training(job, torch.device("cpu"), math.inf)


def weights(training: Training) -> dict[str, torch.Tensor]:
    """A copy of a head's parameters."""
    return {name: each.detach().clone() for name, each in training.head.named_parameters()}
