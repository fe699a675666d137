"""A target answers the questions of a run in an engine, which hands out its hidden states.

Each engine of a run is a process of its own: ``python -m vllm_graft.train.target_answers WORK
PART PARTS``.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.base.values import human, reason_of
from vllm_graft.train import states
from vllm_graft.train.job import Job
from vllm_graft.train.progress import Progress
from vllm_graft.train.states import Entry
from vllm_graft.train.target import Target
from vllm_graft.train.texts import Messages, Text, read_texts, split

SHOWN = 192
"""Held-out questions, at most."""

READING = 6
"""What others wrote is read for the time of answers, divided by this."""

OTHER = "other"
"""Folder for states that nobody reads."""

_FLUSH_SECONDS = 120


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        tokens: ids of the prompt; of the whole text, where the target only reads it.
        prompt: how many of these somebody else than an assistant wrote.
        temperature: of the answer; -1 where there is none to write.
    """

    number: int
    tokens: list[int]
    prompt: int
    temperature: float
    held_out: bool = False


def tokens_of(tokenizer: Any, text: Messages | str, *, answer_follows: bool = True) -> list[int]:
    """Token ids of turns in the target's chat template, or of a text as it is."""
    if isinstance(text, str) or not getattr(tokenizer, "chat_template", None):
        whole = text if isinstance(text, str) else "\n".join(content for _, content in text)
        plain: list[int] = list(tokenizer.encode(whole))
        return plain
    turns = [{"role": role, "content": content} for role, content in text]
    ids = tokenizer.apply_chat_template(
        turns, add_generation_prompt=answer_follows, tokenize=True, return_dict=False
    )
    return list(ids)


def asked(
    texts: Sequence[Text],
    tokenizer: Any,
    job: Job,
    temperatures: Sequence[float],
    first: int,
    *,
    held_out: bool,
) -> Iterator[Turn]:
    """Each question at one temperature, then, after all others had their turn, at the next."""
    for turn in range(len(temperatures)):
        for place, text in enumerate(texts):
            tokens = tokens_of(tokenizer, text.prompt)
            if 0 < len(tokens) <= job.longest // 2:
                temperature = temperatures[(place + turn) % len(temperatures)]
                number = first + turn * len(texts) + place
                yield Turn(number, tokens, len(tokens), temperature, held_out)


def written(texts: Sequence[Text], tokenizer: Any, job: Job, first: int) -> Iterator[Turn]:
    """What somebody wrote behind the questions, for the target to read."""
    for place, text in enumerate(texts):
        if text.whole is not None:
            tokens = tokens_of(tokenizer, text.whole, answer_follows=False)[: job.longest - 1]
            prompt = len(tokens_of(tokenizer, text.prompt))
            if len(tokens) > prompt + 2:
                yield Turn(first + place, tokens, prompt, -1.0)


class Answering:
    """An engine that is asked, and the folder that its states go to.

    Args:
        llm: a ``vllm.LLM`` with `engine_options`.
        part, parts: number of this engine, and how many there are.
        shows: whether to draw a progress bar.
    """

    def __init__(
        self, llm: Any, job: Job, part: int = 0, parts: int = 1, *, shows: bool = False
    ) -> None:
        self.engine, self.job, self.folder = llm.llm_engine, job, Path(job.states)
        self.target = Target.load(job.target)
        (self.folder / OTHER).mkdir(parents=True, exist_ok=True)
        found = states.read_entries(self.folder)
        self.done = {entry.number for entry in found}
        self.index = states.index_of(self.folder, part).open("a")
        # In tokens, of all engines; what is in flight may become as long as a text may be.
        self.taken = sum(entry.tokens for entry in found) // parts
        self.most = job.disk_bytes // self.target.token_bytes // parts
        self.shows = shows
        self.at_a_time = 2 * self.engine.vllm_config.scheduler_config.max_num_seqs
        self.unwritten: deque[Entry] = deque()
        self.count, self.tokens = len(self.done), 0

    def ask(self, turns: Iterator[Turn], seconds: float, what: str) -> None:
        """Ask until `seconds` or the room for states are over, or all have answered.

        Raises:
            ConfigError: states can't be written.
        """
        began, waiting = time.perf_counter(), dict[str, Turn]()
        turns = (turn for turn in turns if turn.number not in self.done)
        with Progress(what, shows=self.shows) as bar:
            while True:
                passed = time.perf_counter() - began
                room = (self.most - self.taken) // self.job.longest
                free = min(self.at_a_time, room) - len(waiting) if passed < seconds else 0
                for turn in islice(turns, max(0, free)):
                    waiting[self._add(turn)] = turn
                if not waiting:
                    break
                for output in self.engine.step():
                    if output.finished:
                        self._finish(waiting.pop(output.request_id), output)
                bar.update(passed / seconds, texts=self.count, tokens=self.tokens)
        self._settle()

    def _add(self, turn: Turn) -> str:
        from vllm import SamplingParams

        most = 1 if turn.temperature < 0 else self.job.max_tokens
        kept = {
            "include_output_tokens": turn.temperature >= 0,
            "hidden_states_path": str(states.file_of(self.folder, turn.number)),
        }
        params = SamplingParams(
            temperature=max(0.0, turn.temperature),
            max_tokens=min(most, self.job.longest - len(turn.tokens)),
            seed=self.job.seed + turn.number,
            detokenize=False,
            extra_args={"kv_transfer_params": kept},
        )
        name = str(turn.number)
        self.engine.add_request(name, {"prompt_token_ids": turn.tokens}, params)
        return name

    def _finish(self, turn: Turn, output: Any) -> None:
        drawn = len(output.outputs[0].token_ids)
        # The last token was never an input, so that it has no states.
        length = len(turn.tokens) + (drawn - 1 if turn.temperature >= 0 else 0)
        entry = Entry(turn.number, length, turn.prompt, turn.temperature, turn.held_out)
        self.count, self.tokens = self.count + 1, self.tokens + drawn
        self.taken += length
        self.unwritten.append(entry)
        self._note()

    def _note(self) -> None:
        """Note what has been written meanwhile, in the order in which it ended."""
        ready = []
        while self.unwritten:
            if not states.file_of(self.folder, self.unwritten[0].number).exists():
                break
            ready.append(self.unwritten.popleft())
        states.write_entries(self.index, ready)
        self.done |= {entry.number for entry in ready}

    def _settle(self) -> None:
        """Wait for the last files.

        Raises:
            ConfigError: they don't come.
        """
        from vllm import SamplingParams

        # An engine in this process gives the last states away in its next step.
        self.engine.add_request("last", {"prompt_token_ids": [0]}, SamplingParams(max_tokens=1))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        until = time.perf_counter() + _FLUSH_SECONDS
        while self.unwritten and time.perf_counter() < until:
            self._note()
            time.sleep(0.02 if self.unwritten else 0)
        if self.unwritten:
            import shutil

            free = human(shutil.disk_usage(self.folder).free)
            raise ConfigError(
                f"--states {self.folder}: the states of {len(self.unwritten)} texts are not "
                f"there after {_FLUSH_SECONDS} s, with {free} free. The engine's log above says "
                "why; give a folder with room, or a lower --disk."
            )


def engine_options(job: Job) -> dict[str, Any]:
    """What an engine takes beside the user's flags to hand out its states."""
    layers = Target.load(job.target).taken
    hidden = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": hidden,
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
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    from vllm_graft.plan.request import Request

    given = Request.parse([job.model, *job.flags], preset=False)
    options = {
        each.name: getattr(given.engine, each.name) for each in dataclasses.fields(EngineArgs)
    }
    if not given.has("--max-model-len"):
        options["max_model_len"] = job.longest
    return LLM(**{**options, **engine_options(job)})


def answer_all(llm: Any, job: Job, part: int = 0, parts: int = 1, *, shows: bool = False) -> None:
    """Have an engine answer its part of the questions, and read what was written to them."""
    tokenizer = llm.get_tokenizer()
    learned, held_out = split(read_texts(job.texts, job.longest)[0])
    measured = sorted({0.0, max(job.temperatures)})
    held_out = held_out[:SHOWN]
    held = asked(held_out, tokenizer, job, measured, 0, held_out=True)
    first = len(held_out) * len(measured)
    own = asked(learned, tokenizer, job, job.temperatures, first, held_out=False)
    others = written(learned, tokenizer, job, first + len(learned) * len(job.temperatures))
    answering = Answering(llm, job, part, parts, shows=shows)
    seconds = 60 * job.answer_minutes
    what = "answers" if parts == 1 else f"answers (one engine of {parts})"
    ours = (islice(each, part, None, parts) for each in (held, own))
    answering.ask(chain(*ours), seconds, what)
    answering.ask(islice(others, part, None, parts), seconds / READING, "texts as written")


def main(arguments: Sequence[str]) -> None:
    """Run one engine."""
    work, part, parts = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    job = Job.load(work)
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


if __name__ == "__main__":
    main(sys.argv[1:])
