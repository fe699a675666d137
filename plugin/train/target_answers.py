"""A target answers the questions of a run in an engine, which hands out its hidden states. Each
engine is a process of its own: ``python -m vllm_graft.train.target_answers WORK PART PARTS``."""

import dataclasses
import json
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs

from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.base.values import human, reason_of
from vllm_graft.plan.request import Request
from vllm_graft.train import states
from vllm_graft.train.job import Job, progress_bar, show
from vllm_graft.train.states import Entry
from vllm_graft.train.texts import Text, Tokens, Words, read_texts, split

SHOWN = 192
"""Held-out questions, at most."""

READING = 6
"""What others wrote is read for the time of answers, divided by this."""

OTHER = "other"
"""Folder for states that nobody reads."""

_LAST_SECONDS = 120
"""For files of states behind the last answer."""

Asked = tuple[Entry, list[int]]
"""A request as an entry without an answer, and the tokens that the target is given."""


def tokens_of(tokenizer: Any, text: Words, *, answer_follows: bool = True) -> list[int]:
    """Token ids of turns in the target's chat template, or of a text as it is."""
    if isinstance(text, Tokens):
        return list(text)
    if isinstance(text, str) or not getattr(tokenizer, "chat_template", None):
        whole = text if isinstance(text, str) else "\n".join(content for _, content in text)
        plain: list[int] = list(tokenizer.encode(whole))
        return plain
    turns = [{"role": role, "content": content} for role, content in text]
    ids = tokenizer.apply_chat_template(
        turns, add_generation_prompt=answer_follows, tokenize=True, return_dict=False
    )
    return list(ids)


class Questions:
    """The questions of a job that one of several engines is asked, each with a number of its own.
    Each question comes at one temperature, then, after all others had their turn, at the next."""

    def __init__(self, job: Job, tokenizer: Any, part: int, parts: int) -> None:
        self.job, self.tokenizer, self.part, self.parts = job, tokenizer, part, parts
        self.too_long = set[int]()
        learned, shown = split(read_texts(job.texts, job.longest)[0])
        measured, shown = sorted({0.0, max(job.temperatures)}), shown[:SHOWN]
        first = len(shown) * len(measured)
        own = self._asked(learned, job.temperatures, first, held_out=False)
        self.own = chain(self._asked(shown, measured, 0, held_out=True), own)
        self.written = self._written(learned, first + len(learned) * len(job.temperatures))

    def _asked(
        self, texts: Sequence[Text], temperatures: Sequence[float], first: int, *, held_out: bool
    ) -> Iterator[Asked]:
        for turn in range(len(temperatures)):
            for place in range(self.part, len(texts), self.parts):
                tokens = tokens_of(self.tokenizer, texts[place].prompt)
                if (count := len(tokens)) > self.job.longest // 2:
                    self.too_long.add(first + place)
                elif count:
                    number = first + turn * len(texts) + place
                    temperature = temperatures[(place + turn) % len(temperatures)]
                    yield Entry(number, count, count, temperature, held_out), tokens

    def _written(self, texts: Sequence[Text], first: int) -> Iterator[Asked]:
        """What somebody wrote behind the questions, for the target to read."""
        for place in range(self.part, len(texts), self.parts):
            if (whole := texts[place].whole) is not None:
                tokens = tokens_of(self.tokenizer, whole, answer_follows=False)
                tokens = tokens[: self.job.longest - 1]
                prompt = len(tokens_of(self.tokenizer, texts[place].prompt))
                yield Entry(first + place, len(tokens), prompt, -1.0, False), tokens


class Answering:
    """An engine with `engine_options`, which is number `part` of `parts`, and the folder that its
    states go to. It `shows` a progress bar or not."""

    def __init__(self, llm: Any, job: Job, part: int, parts: int, *, shows: bool) -> None:
        self.engine, self.job, self.folder = llm.llm_engine, job, Path(job.states)
        (self.folder / OTHER).mkdir(parents=True, exist_ok=True)
        found = states.read_entries(self.folder)
        self.done = {entry.number for entry in found}
        self.index = states.open_index(self.folder, part)
        # In tokens; what is in flight may become as long as a text may be.
        self.most = job.disk_bytes // job.target.token_bytes // parts
        self.taken = sum(entry.tokens for entry in found) // parts
        self.at_a_time = 2 * self.engine.vllm_config.scheduler_config.max_num_seqs
        self.unwritten: deque[Entry] = deque()
        self.shows = shows

    def ask(self, questions: Iterator[Asked], seconds: float, what: str) -> None:
        """Ask until `seconds` or the room for states are over, or all have answered. Raises
        `ConfigError` if states can't be written."""
        began, waiting = time.perf_counter(), dict[str, Entry]()
        questions = (each for each in questions if each[0].number not in self.done)
        with progress_bar(what, shows=self.shows) as bar:
            while True:
                passed = time.perf_counter() - began
                room = (self.most - self.taken) // self.job.longest
                free = min(self.at_a_time, room) - len(waiting) if passed < seconds else 0
                for entry, tokens in islice(questions, max(0, free)):
                    self._add(entry, tokens)
                    waiting[str(entry.number)] = entry
                if not waiting:
                    break
                for output in self.engine.step():
                    if output.finished:
                        self._finish(waiting.pop(output.request_id), output)
                show(bar, passed / seconds, tokens=self.taken)
        # An engine in this process gives the last states away in its next step.
        self.engine.add_request("last", {"prompt_token_ids": [0]}, SamplingParams(max_tokens=1))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self._settle()

    def _add(self, entry: Entry, tokens: list[int]) -> None:
        answers = entry.temperature >= 0
        most = min(self.job.max_tokens, self.job.longest - len(tokens)) if answers else 1
        path = str(states.file_of(self.folder, entry.number))
        kept = {"include_output_tokens": answers, "hidden_states_path": path}
        params = SamplingParams(
            temperature=max(0.0, entry.temperature),
            max_tokens=most,
            seed=self.job.seed + entry.number,
            detokenize=False,
            extra_args={"kv_transfer_params": kept},
        )
        self.engine.add_request(str(entry.number), {"prompt_token_ids": tokens}, params)

    def _finish(self, entry: Entry, output: Any) -> None:
        if entry.temperature >= 0:
            # The last token was never an input, so that it has no states.
            drawn = len(output.outputs[0].token_ids) - 1
            entry = dataclasses.replace(entry, tokens=entry.tokens + drawn)
        self.taken += entry.tokens
        self.unwritten.append(entry)
        self._note()

    def _note(self) -> None:
        """Note what has been written meanwhile, in the order in which it ended."""
        while self.unwritten:
            if not states.file_of(self.folder, self.unwritten[0].number).exists():
                break
            done = dataclasses.asdict(self.unwritten.popleft())
            self.index.write(json.dumps(done) + "\n")
        self.index.flush()

    def _settle(self) -> None:
        until = time.perf_counter() + _LAST_SECONDS
        while self.unwritten and time.perf_counter() < until:
            self._note()
            time.sleep(0.02)
        if self.unwritten:
            free = human(shutil.disk_usage(self.folder).free)
            raise ConfigError(
                f"--states {self.folder}: the states of {len(self.unwritten)} texts are not "
                f"there after {_LAST_SECONDS} s, with {free} free. The engine's log above says "
                "why; give a folder with room, or a lower --disk."
            )


def engine_options(job: Job) -> dict[str, Any]:
    """What an engine takes beside the user's flags to hand out its states."""
    layers = {"eagle_aux_hidden_state_layer_ids": list(job.target.taken)}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": layers},
        },
        "kv_transfer_config": {
            "kv_connector": "StateWriter",
            "kv_connector_module_path": "vllm_graft.train.state_writer",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "allow_custom_save_path": True,
                "shared_storage_path": str(Path(job.states) / OTHER),
                "use_synchronization_lock": False,
            },
        },
        # States of a prompt that is not computed are not in the cache.
        "enable_prefix_caching": False,
    }


def make_engine(job: Job) -> Any:
    """A ``vllm.LLM`` with the user's flags and ours."""
    given = Request.parse([job.model, *job.flags], preset=False)
    names = [each.name for each in dataclasses.fields(EngineArgs)]
    options = {name: getattr(given.engine, name) for name in names} | engine_options(job)
    if not given.has("--max-model-len"):
        options["max_model_len"] = job.longest
    return LLM(**options)


def answer_all(llm: Any, job: Job, part: int = 0, parts: int = 1, *, shows: bool = False) -> None:
    """Have an engine answer its part of the questions, and read what was written to them."""
    questions = Questions(job, llm.get_tokenizer(), part, parts)
    answering, seconds = Answering(llm, job, part, parts, shows=shows), 60 * job.answer_minutes
    answering.ask(questions.own, seconds, "answers")
    if questions.too_long:
        most, whose = job.longest // 2, f" of part {part + 1} of {parts}" if parts > 1 else ""
        told = f"have more than {most} tokens, half of --longest, and were not asked"
        print(f"{len(questions.too_long)} questions{whose} {told}.", flush=True)
    answering.ask(questions.written, seconds / READING, "texts as written")


def main(arguments: Sequence[str]) -> None:
    """Run one engine."""
    job, part, parts = Job.load(Path(arguments[0])), int(arguments[1]), int(arguments[2])
    # The engine's processes end with this one only if it ends as Python does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        llm = make_engine(job)
    except Exception as error:  # Whatever vLLM, a device or a checkpoint says.
        sys.exit(
            f"vLLM can't start for {job.model}: {reason_of(error)}. Its log is above. Flags of "
            "`vllm serve` may follow those of `vllm-graft train`, as --gpu-memory-utilization, "
            "--tensor-parallel-size or --max-num-seqs."
        )
    try:
        answer_all(llm, job, part, parts, shows=part == 0)
    except GraftError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("stopped while the target answered")


if __name__ == "__main__":
    main(sys.argv[1:])
