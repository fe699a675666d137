"""The command line of ``vllm-graft train``: what is asked for is checked, then processes work."""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError

from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.base.values import human, shown
from vllm_graft.train.job import BEFORE, FILE, FOLDER, REPORT, Job, flag_of
from vllm_graft.train.target import Target, copy_tokenizer
from vllm_graft.train.texts import read_texts, require_tokens, snapshot

ABOUT = """Train an EAGLE-3 head for MODEL. It answers the questions of texts in an engine of vLLM,
which hands out its hidden states, and a head learns from these. The result is a folder that
`vllm serve --speculative-config` takes. All visible GPUs work; without one, a CPU does for tiny
models. A run that was killed goes on with the same command. Flags of `vllm serve` may follow those
below; they are for the engine that answers."""

_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

ANSWER_SHARE, DISK_SHARE = 0.4, 0.8
"""Of the minutes, for answers, and of what is free, for states, where nothing else is said."""

LEAST_TOKENS = 20_000
"""Tokens whose states have to have room; some answers."""

LEAST_MINUTES = 2.0
"""Minutes of training below which it is said that the head will be poor."""

AGAIN = 40.0
"""Seconds after which a process that has not ended is told so again: pyzmq loses a signal that
comes while vLLM waits in its poll for an engine to start. torchrun gives its own processes 30, and
a signal meanwhile would have it leave them behind."""

_ANSWERED = "answered"
"""File that says that the answers are complete."""

_ENGINE, _TRAINING = "vllm_graft.train.target_answers", "vllm_graft.train.training"

_NUMBERS = [each for each in fields(Job) if each.metadata]


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's own options."""
    parser = argparse.ArgumentParser(prog="vllm-graft train", description=ABOUT, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL", help="the target: a folder or a name, as `vllm serve` takes it")
    told = "*.jsonl or *.json with messages, conversations, prompt or text in a row, or plain text"
    add("--texts", nargs="+", default=[], metavar="FILE", help=told)
    told = "what a server recorded: the folder of its --additional-config.graft.learn.record"
    add("--from-traffic", metavar="FOLDER", help=told)
    told = "of what was recorded, the newest only, as 64MiB, which are some 10 million tokens"
    add("--newest", metavar="SIZE", help=told)
    told = "go on with this head instead of a new one; it keeps its draft vocabulary"
    add("--start-from", default="", metavar="HEAD", help=told)
    add("--out", required=True, metavar="HEAD", help="folder of the head, which is made")
    for each in _NUMBERS:
        told = f"{each.metadata['help']} (default: %(default)g)"
        add(flag_of(each.name), type=type(each.default), default=each.default, help=told)
    told = "of answers, in turns (default: 0 0.6 1)"
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.6, 1.0], help=told)
    add("--states", metavar="FOLDER", help="where hidden states wait (default: in HEAD)")
    told = "most that they may take, as 200GiB (default: 80 %% of what is free)"
    add("--disk", metavar="SIZE", help=told)
    add("--keep", action="store_true", help="keep states and checkpoints of a finished run")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    begin()
    until = time.time()
    read, flags = make_parser().parse_known_args(arguments)
    try:
        print(run(read, flags, until + 60 * read.minutes))
    except GraftError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped: give the same command again, and it goes on")
    return 0


def begin() -> None:
    """Have this process and its own ones say little, and end them at a signal as Ctrl-C would."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def check(read: argparse.Namespace, flags: Sequence[str]) -> None:
    """Raise `GraftError` if options, the model, or the head to go on with can't be had."""
    _require_options(read)
    _target_of(read, _configured(read.model, flags)[1])


def run(read: argparse.Namespace, flags: Sequence[str], until: float) -> str:
    """Check what was asked for, and do it; returns lines on it. Raises `GraftError` if something
    about it is wrong."""
    _require_options(read)
    out = _folder_of(read.out)
    if read.from_traffic is not None:
        newest = None if read.newest is None else _size("--newest", read.newest)
        copy = snapshot(Path(read.from_traffic), out / FOLDER, newest)
        read.texts = [*read.texts, str(copy)]
    texts, notes = read_texts(read.texts, read.longest)
    tell(f"{len(texts)} questions of {len(read.texts)} files", *notes)
    tell(f"Reading the configuration of {read.model} with vLLM, whose import takes some time.")
    engine, model_config = _configured(read.model, flags)
    target = _target_of(read, model_config)
    require_tokens(texts, target.vocab, read.model)
    job = _job_of(read, flags, out, target, model_config.max_model_len)
    continues = job.continues()
    job.save()
    if continues:
        tell(f"{job.work} has a run of this job, which goes on.")
    _answer(job, engine)
    _train(job, until)
    copied = copy_tokenizer(job.model, model_config.revision, out)
    if not job.keep:
        shutil.rmtree(job.states, ignore_errors=True)
        shutil.rmtree(job.work, ignore_errors=True)
    report = json.loads((out / REPORT).read_text())
    return _summary(job, report, copied)


def tell(*lines: str) -> None:
    """Say what goes on, beside what the command prints."""
    for each in lines:
        print(each, file=sys.stderr, flush=True)


def _require_options(read: argparse.Namespace) -> None:
    for each in _NUMBERS:
        value, low = getattr(read, each.name), each.metadata["least"]
        if not low <= value < float("inf"):
            raise ConfigError(f"{flag_of(each.name)} is {value}: give a number from {low} on.")
    if not read.texts and read.from_traffic is None:
        raise ConfigError("Nothing says what to learn from: give --texts, --from-traffic, or both.")
    if any(not 0 <= each <= 2 for each in read.temperatures) or 0.0 not in read.temperatures:
        raise ConfigError(
            f"--temperatures is {' '.join(map(str, read.temperatures))}: give numbers from 0 to 2, "
            "0 among them, because the greedy answers say whether the target's logits are right."
        )
    if read.batch_tokens < read.longest:
        raise ConfigError(
            f"--batch-tokens is {read.batch_tokens}, and a text may have --longest "
            f"{read.longest}: raise the first, or lower the second."
        )


def _folder_of(name: str) -> Path:
    out = Path(name).resolve()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {name} is a file: give a folder that does not exist yet.")
    if out.is_dir() and any(out.iterdir()) and not (out / FOLDER).is_dir():
        raise ConfigError(
            f"--out {name} has files of something else ({shown(next(out.iterdir()).name)}): give a "
            "folder that is empty or does not exist yet."
        )
    try:
        (out / FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {name} can't be made: {error}. Give another folder.") from None
    return out


def _configured(model: str, flags: Sequence[str]) -> tuple[Any, Any]:
    """VLLM's ``EngineArgs`` and ``ModelConfig``, of files alone. Raises `ConfigError` if vLLM
    refuses them."""
    from vllm_graft.plan.planning import refused
    from vllm_graft.plan.request import Request, inspecting

    for each in flags:
        name = each.replace("_", "-").partition("=")[0].partition(".")[0]
        if name in ("--speculative-config", "--kv-transfer-config", "-sc"):
            raise ConfigError(f"{name} is given, and training sets it: drop it.")
    try:
        with inspecting():
            engine = Request.parse([model, *flags], preset=False).engine
            return engine, engine.create_model_config()
    except Exception as error:  # Whatever vLLM refuses it with.
        raise ConfigError(f"MODEL {model}: {refused(error, '', model).refused}") from None


def _target_of(read: argparse.Namespace, model_config: Any) -> Target:
    """The target, with the layers that the head to go on with reads. Raises `ConfigError` if that
    is another model's."""
    target = Target.of(model_config)
    if not read.start_from:
        return target
    from vllm_graft.train.draft_head import layer_of, read_head

    config = read_head(Path(read.start_from))[0].config
    for name in ("hidden_size", "vocab_size"):
        if (found := layer_of(config)[name]) != target.layer[name]:
            raise ConfigError(
                f"--start-from (of `vllm-graft learn`: --head) {read.start_from} has a {name} of "
                f"{found}, and MODEL {read.model} has {target.layer[name]}: give a head that was "
                "trained for it."
            )
    return replace(target, aux=tuple(config["eagle_aux_hidden_state_layer_ids"]))


def _size(option: str, text: str) -> int:
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise ConfigError(f"{option} is {shown(text)}: give a size, as 200GiB.") from None


def _job_of(
    read: argparse.Namespace, flags: Sequence[str], out: Path, target: Target, longest: int
) -> Job:
    """The job, if there is room for it. Raises `ConfigError` if there is not."""
    states = Path(read.states).resolve() / out.name if read.states else out / FOLDER / "states"
    try:
        states.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--states {states} can't be made: {error}.") from None
    if any(states.iterdir()) and not (out / FOLDER / FILE).exists():
        # It is removed in the end.
        raise ConfigError(f"--states {states} has files of something else: give another folder.")
    _require_room(out, target, min(read.draft_vocab, target.vocab // 2))
    taken = sum(file.stat().st_size for file in states.iterdir() if file.is_file())
    most = int(DISK_SHARE * (shutil.disk_usage(states).free + taken))
    if read.disk is not None:
        most = min(most, _size("--disk", read.disk))
    if most < (least := LEAST_TOKENS * target.token_bytes):
        raise ConfigError(
            f"--states {states} has {human(most)} for states, and {LEAST_TOKENS} tokens take "
            f"{human(least)}: give a folder with room, or a larger --disk."
        )
    given = {each.name: getattr(read, each.name, None) for each in fields(Job)}
    found = {
        "answer_minutes": read.answer_minutes or ANSWER_SHARE * read.minutes,
        "model": str(Path(read.model).resolve()) if Path(read.model).exists() else read.model,
        "texts": tuple(str(Path(each).resolve()) for each in read.texts),
        "out": str(out),
        "start_from": str(Path(read.start_from).resolve()) if read.start_from else "",
        "states": str(states),
        "target": target,
        "disk_bytes": most,
        "flags": tuple(flags),
        "longest": min(read.longest, longest),
        "temperatures": tuple(read.temperatures),
    }
    return Job(**{**given, **found})


def _require_room(out: Path, target: Target, draft_vocab: int) -> None:
    """Two checkpoints exist while one is written, of three numbers for each parameter."""
    import torch

    from vllm_graft.train.draft_head import Head, head_config

    with torch.device("meta"):
        head = Head(head_config(target, "", draft_vocab, 1))
    parameters = sum(each.numel() for each in head.parameters())
    if (free := shutil.disk_usage(out).free) < (takes := 2 * 3 * 4 * parameters):
        raise ConfigError(
            f"--out {out} has {human(free)} free, and checkpoints of this head take "
            f"{human(takes)}: make room, or give another folder."
        )


def _answer(job: Job, engine: Any) -> None:
    done = job.work / _ANSWERED
    if done.exists():
        return
    cards, size = visible_cards(), engine.tensor_parallel_size * engine.pipeline_parallel_size
    groups = [cards[start : start + size] for start in range(0, len(cards) // size * size, size)]
    if cards and not groups:
        raise ConfigError(
            f"--tensor-parallel-size and --pipeline-parallel-size ask for {size} GPUs, and "
            f"{len(cards)} are visible: lower them, or set CUDA_VISIBLE_DEVICES."
        )
    parts = max(1, len(groups))
    tell(f"{job.model} answers for {job.answer_minutes:.3g} minutes, in {parts} engines.")
    _finished(
        [
            (
                [sys.executable, "-P", "-m", _ENGINE, str(job.work), str(part), str(parts)],
                {"CUDA_VISIBLE_DEVICES": ",".join(groups[part])} if groups else {},
            )
            for part in range(parts)
        ]
    )
    done.touch()


def _train(job: Job, until: float) -> None:
    count = len(visible_cards())
    left = max(0.0, until - time.time()) / 60
    tell(f"A head trains for the {left:.3g} minutes that are left.")
    if left < LEAST_MINUTES:
        tell(
            "That is too little for a head that drafts well: stop it, and give the same command "
            "with more --minutes (of `vllm-graft learn`: --minutes-per-round). Answers of `train` "
            "stay."
        )
    command = [sys.executable, "-P", "-m", _TRAINING]
    if count > 1:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command = [sys.executable, "-P", "-m", *launcher, "-m", _TRAINING]
    _finished([([*command, str(job.work), str(until)], {})])


def visible_cards() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",") if torch.cuda.is_available() else []
    return [str(number) for number in range(torch.cuda.device_count())]


def _finished(commands: Sequence[tuple[list[str], Mapping[str, str]]]) -> None:
    """Run processes side by side until all end. Raises `SystemExit` if one of them failed; it has
    said why."""
    running = [subprocess.Popen(words, env={**os.environ, **more}) for words, more in commands]
    try:
        while any(each.poll() is None for each in running):
            if any(each.returncode for each in running):
                break
            time.sleep(0.1)
    finally:
        while alive := [each for each in running if each.poll() is None]:
            for each in alive:
                each.terminate()
            until = time.monotonic() + AGAIN
            for each in alive:
                with suppress(subprocess.TimeoutExpired):
                    each.wait(max(0.0, until - time.monotonic()))
    if any(each.returncode for each in running):
        raise SystemExit(1)


def _summary(job: Job, report: Mapping[str, Any], copied: Sequence[str]) -> str:
    lines = [f"{job.out}: {report['steps']} steps on {report['tokens']} tokens"]
    measured = {f"held out, {name}": each for name, each in report["held out"].items()}
    measured |= {f"before, {name}": each for name, each in report.get(BEFORE, {}).items()}
    for name, found in measured.items():
        drafts = " ".join(f"{each:.2f}" for each in found["agree"])
        overlap = found["overlap"][0]
        lines.append(
            f"{name}: acceptance length {found['length']:.2f} of a greedy chain of "
            f"{job.passes}; by depth {drafts}; first sampled draft accepted {overlap:.2f}"
        )
    if not copied:
        lines.append("The target has no tokenizer files beside it; none is copied.")
    speculative = json.dumps({"method": "eagle3", "model": job.out, "num_speculative_tokens": 5})
    serve = ["vllm", "serve", job.model, "--additional-config.graft", "auto"]
    return "\n".join([*lines, shlex.join([*serve, "--speculative-config", speculative])])
