"""A head learns from a target's states, on one device or several. It is a process of its own, or
one for each GPU: ``python -m vllm_graft.train.training WORK``, alone or started by ``torchrun``."""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.train import states
from vllm_graft.train.draft_head import (
    Agreement,
    Head,
    agreement,
    head_config,
    read_head,
    save_head,
)
from vllm_graft.train.job import BEFORE, REPORT, Job, progress_bar, show
from vllm_graft.train.lessons import (
    Lesson,
    Lessons,
    batches,
    endless,
    frequent_tokens,
    token_counts,
    useful,
)
from vllm_graft.train.output_layers import OutputLayers

DECAY = 0.9
"""Weight of a pass's loss over that of the pass before."""

WARM_UP = 0.04
"""Share of training in which the rate rises."""

LOOKS = 20
"""How often, in a run, the bar's acceptance length is measured anew."""

MEASURE_SECONDS = 20
"""Kept for the measure of the finished head."""

RATE, RATE_HIDDEN, RATE_ON = 1e-3, 1536, 0.1
"""A learning rate, the hidden size up to which it does, and the share of it for a head that goes
on: raised, it forgets more of what it knew."""

FORM_TEXTS = 8
"""Answers at a temperature that say of which form the target's last norm is."""

CHECKPOINT = "checkpoint.pt"
"""File with parameters, the optimizer's state, steps, seconds that are over, and those in all."""

_CLOCK = ("step", "passed", "whole")


class Learner(nn.Module):
    """A head with its loss."""

    def __init__(self, head: Head, passes: int) -> None:
        super().__init__()
        self.head, self.passes = head, passes

    def forward(self, lesson: Lesson) -> Tensor:
        """Mean cross-entropy with the target's distribution, summed over passes."""
        total, wanted = torch.zeros((), device=lesson.aux.device), lesson.wanted
        for number, found in enumerate(self.head(lesson.aux, lesson.embeds, self.passes)):
            # Logits of all passes would be most of the memory, so they are computed twice.
            entropy = checkpoint(self._entropy, found[lesson.rows], wanted, use_reentrant=False)
            total = total + DECAY**number * entropy
        return total

    def _entropy(self, found: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.head.logits(found).float(), wanted.float())


def begin_like_the_target(head: Head, layers: OutputLayers, ids: Tensor) -> None:
    """Have a new head continue the target's last states by the target's own output layer."""
    hidden = layers.target.hidden
    with torch.no_grad():
        head.lm_head.weight.copy_(layers.output[ids])
        head.norm.weight.copy_(layers.gain)
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -hidden:] += torch.eye(hidden, device=head.fc.weight.device)
        head.midlayer.self_attn.o_proj.weight.mul_(0.1)
        head.midlayer.mlp.down_proj.weight.mul_(0.1)


class Training:
    """One run of one process. `until`: seconds since 1970; by then the head is written."""

    def __init__(self, job: Job, device: torch.device, until: float) -> None:
        self.job, self.device, self.until = job, device, until
        self.target, self.folder = job.target, Path(job.states)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        entries = useful(states.read_entries(self.folder), job.passes)
        self.learned = [each for each in entries if not each.held_out]
        self.shown = [each for each in entries if each.held_out]
        if not self.learned or not self.shown:
            raise ConfigError(
                f"The target's answers are {len(self.learned)} texts to learn from and "
                f"{len(self.shown)} held-out ones that are long enough for --passes {job.passes}: "
                "give more --texts, or more --answer-minutes."
            )
        layers = OutputLayers(self.target, job.model, device)
        greedy = [each for each in self.shown if each.temperature == 0][:FORM_TEXTS]
        drawn = [each for each in self.shown if each.temperature > 0][:FORM_TEXTS]
        layers.find_form(self.folder, greedy + drawn)
        own = [each for each in self.learned if each.temperature >= 0] or self.learned
        counts = token_counts(self.folder, own, self.target.vocab)
        torch.manual_seed(job.seed)
        if job.start_from:
            head, ids = read_head(Path(job.start_from))
            self.head = head.to(device)
        else:
            ids = frequent_tokens(counts, min(job.draft_vocab, self.target.vocab // 2))
            config = head_config(self.target, job.model, len(ids), job.passes)
            self.head = Head(config).to(device)
            begin_like_the_target(self.head, layers, ids.to(device))
        self.covered = (counts[ids].sum() / counts.sum().clamp(min=1)).item()
        self.lessons = Lessons(self.target, layers, self.folder, ids, job.passes)
        learner = Learner(self.head, job.passes)
        self.learner: nn.Module = DistributedDataParallel(learner) if self.ranks > 1 else learner
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(), betas=(0.9, 0.95), weight_decay=0.0
        )
        rate = RATE * min(1.0, RATE_HIDDEN / self.target.hidden)
        self.rate = job.rate or rate * (RATE_ON if job.start_from else 1.0)
        # Seconds that are over, and those of the whole run.
        self.step, self.before, self.seconds = 0, 0.0, math.inf
        self.losses: list[float] = []
        if (file := job.work / CHECKPOINT).exists():
            state = torch.load(file, map_location=device, weights_only=True)
            self.head.load_state_dict(state["head"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.before, self.seconds = (state[name] for name in _CLOCK)

    def run(self, *, shows: bool = False, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Train until time or steps are over; return whether they are. `shows`: whether to draw a
        progress bar. `stopped`: asked in each step; a run that is stopped goes on from where it
        was."""
        job, began = self.job, time.perf_counter()
        left = max(1.0, self.until - time.time() - MEASURE_SECONDS)
        # The rate goes on where it was, unless less time is left for it.
        self.seconds = min(self.seconds, self.before + left)
        saved, looked, told = began, -1, dict[str, str]()
        given = islice(
            endless(self.learned, job.batch_tokens, job.seed, self.ranks), self.step, None
        )
        with progress_bar("training", shows=shows) as bar, ExitStack() as reading:
            lessons = self.lessons.each(found[self.rank] for found in given)
            reading.callback(lessons.close)
            self.learner.train()
            for lesson in lessons:
                passed = self.before + time.perf_counter() - began
                share = max(passed / self.seconds, self.step / job.steps if job.steps else 0.0)
                due = time.perf_counter() - saved >= job.save_seconds
                share, stop, save = self._agreed(share, stopped(), due and self.step > 0)
                over = share >= 1
                if over or stop or save:
                    self._save(passed)
                    saved = time.perf_counter()
                if over or stop:
                    return bool(over)
                if looked < int(share * LOOKS):
                    looked = int(share * LOOKS)
                    told["acceptance length"] = f"{self.measured(quick=True).length:.2f}"
                    self.learner.train()
                self._learn(lesson, share)
                show(bar, share, step=self.step, loss=f"{self.losses[-1]:.3f}", **told)
        raise AssertionError("batches have no end")

    def _agreed(self, share: float, stop: bool, save: bool) -> tuple[float, bool, bool]:
        """The largest of all ranks, whose clocks differ, so that all do the same in a step."""
        found = torch.tensor([share, stop, save], dtype=torch.float64, device=self.device)
        if self.ranks > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        share, *flags = found.tolist()
        return share, bool(flags[0]), bool(flags[1])

    def _learn(self, lesson: Lesson, share: float) -> None:
        rising = min(1.0, max(share, 1e-3) / WARM_UP)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * rising * 0.5 * (1 + math.cos(math.pi * share))
        on_gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            loss = self.learner(lesson)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.losses.append(loss.item())

    def _save(self, seconds: float) -> None:
        """Write where training is. Batches and their order follow from the seed and the number of
        the step, and nothing else is drawn, so that no generator has a state to keep."""
        if self.rank:
            return
        state: dict[str, Any] = dict(zip(_CLOCK, (self.step, seconds, self.seconds), strict=True))
        state |= {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        part = self.job.work / f"{CHECKPOINT}.part"
        try:
            torch.save(state, part)
            part.replace(part.with_suffix(""))
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"--out {self.job.out}: the checkpoint of step {self.step} can't be written: "
                f"{error}. Make room, and give the same command again: it goes on."
            ) from None

    def measured(
        self, temperature: float = 0.0, *, quick: bool = False, head: Head | None = None
    ) -> Agreement:
        """How the head, or another, does on held-out answers, or on a batch of them."""
        self.learner.eval()
        shown = [each for each in self.shown if each.temperature == temperature] or self.shown
        found = batches(shown, self.job.batch_tokens, self.job.seed)[: 1 if quick else None]
        lessons = self.lessons.each(iter(found))
        measured: Agreement = agreement(head or self.head, lessons, self.job.passes)
        return measured

    def _by_temperature(self, head: Head) -> dict[str, Any]:
        return {
            f"temperature {each:g}": asdict(self.measured(each, head=head))
            for each in sorted({entry.temperature for entry in self.shown})
        }

    def finish(self) -> None:
        """Write the head and the report. Raises `ConfigError` if the head's numbers are none."""
        job, out = self.job, Path(self.job.out)
        if not all(each.isfinite().all() for each in self.head.parameters()):
            raise ConfigError(
                f"--rate: at {self.rate:g} the head became infinite or no number within "
                f"{self.step} steps, and nothing is written: give a lower one, and another --out."
            )
        save_head(self.head, self.lessons.ids, out)
        report = {
            "held out": self._by_temperature(self.head),
            "texts": len(self.learned),
            "tokens": sum(each.tokens for each in self.learned),
            "draft vocabulary": len(self.lessons.ids),
            "share of answers that it covers": round(self.covered, 4),
            "steps": self.step,
            "devices": self.ranks,
            "losses": [round(each, 4) for each in self.losses[:: max(1, len(self.losses) // 50)]],
            "job": asdict(job),
        }
        if job.start_from:
            before = read_head(Path(job.start_from))[0].to(self.device)
            report[BEFORE] = self._by_temperature(before)
        (out / REPORT).write_text(json.dumps(report, indent=1) + "\n")


def begin_ranks() -> torch.device:
    """Join the other processes that ``torchrun`` started, if it did; return this one's device."""
    cuda, rank = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    return device


def main(arguments: Sequence[str]) -> None:
    """Train in this process until the moment ``arguments[1]`` (seconds since 1970)."""
    job, asked = Job.load(Path(arguments[0])), list[int]()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda number, frame: asked.append(number))
    device = begin_ranks()
    try:
        training = Training(job, device, float(arguments[1]))
        over = training.run(shows=training.rank == 0, stopped=lambda: bool(asked))
        if dist.is_initialized():
            dist.destroy_process_group()
        if over and training.rank == 0:
            training.finish()
    except torch.OutOfMemoryError as error:
        sys.exit(
            f"--batch-tokens is {job.batch_tokens}, and {device} has not enough memory for them "
            f"({str(error).splitlines()[0]}): give the same command with half of it, and it goes "
            "on."
        )
    except GraftError as error:
        sys.exit(str(error))
    if not over:
        sys.exit(f"stopped at step {training.step}: give the same command again, and it goes on")


if __name__ == "__main__":
    main(sys.argv[1:])
