"""The users' turns in the sessions of ``vllm-graft bench hicache``, from a file."""

from pathlib import Path

from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.common.serve_flags import Serving
from vllm_graft.bench.hicache.cache_parts import Sizes

Talk = list[list[int]]
"""The token ids of each turn of a user."""


def read_talks(file: Path | None, given: Serving, sizes: Sizes) -> list[Talk]:
    """The users' turns of as many conversations as there are sessions; none without a file. Raises
    `BenchmarkError` if the file can't be read as ShareGPT's, or has no conversation."""
    if file is None:
        return []
    from vllm.benchmarks.datasets import ShareGPTDataset

    tokenizer = given.tokenizer
    try:
        # Those of one turn are left out there.
        entries = ShareGPTDataset(dataset_path=str(file)).data or []
        said = [
            [turn["value"] for turn in entry["conversations"] if turn["from"] in ("human", "user")]
            for entry in entries[: sizes.sessions]
        ]
        talks = [
            [tokenizer.encode(text)[: sizes.turn_tokens] for text in texts if text]
            for texts in said
        ]
    except Exception as error:  # Of JSON, and of another form.
        raise BenchmarkError(
            f"--dataset {file} can't be read: {type(error).__name__}: {error}. Give a JSON file of "
            'conversations as ShareGPT\'s: [{"conversations": [{"from": "human", "value": "..."}, '
            '{"from": "gpt", "value": "..."}]}]'
        ) from None
    found = [talk for talk in talks if talk]
    if not found:
        raise BenchmarkError(f"--dataset {file} has no conversation with a user's turn.")
    return found
