"""Prompts of ``vllm-graft bench trees``: a file's, or those of vLLM's own datasets."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_graft.bench.common.closed_loop import Request
from vllm_graft.bench.common.report import BenchmarkError

SHAREGPT = (
    "https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve/main/"
    "ShareGPT_V3_unfiltered_cleaned_split.json"
)

MORE: dict[str, type] = {
    "tools": list,
    "schema": dict,
    "output_tokens": int,
    "session": str,
    "cache_salt": str,
    "prediction": str,
}
"""What a line of a JSONL file may say besides a prompt or messages, as `Request` has it."""


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what is asked."""
    told = (
        'what is asked: a JSONL file with a "prompt" or "messages" in each line, a JSON file of '
        "conversations as ShareGPT's, 'sharegpt' (with --dataset-path), a dataset of the Hub that "
        "vLLM knows, or 'random', which no draft predicts well"
    )
    parser.add_argument("--dataset", required=True, metavar="FILE|NAME", help=told)
    parser.add_argument("--dataset-path", type=Path, metavar="FILE", help="ShareGPT's file")
    told = "tokens of a random prompt; longer ones of a dataset are left out (default: %(default)s)"
    parser.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help=told)


def require_dataset(dataset: str, path: Path | None) -> Path | None:
    """A dataset's file, None for one without; a BenchmarkError if it is not there, or not given."""
    if dataset == "sharegpt" and path is None:
        raise BenchmarkError(
            f"--dataset sharegpt: give the file with --dataset-path; it is at {SHAREGPT}"
        )
    file = path if dataset == "sharegpt" else Path(dataset)
    assert file is not None
    if file.is_file():
        return file
    if dataset == "sharegpt" or file.suffix in (".json", ".jsonl"):
        flag = "--dataset-path" if dataset == "sharegpt" else "--dataset"
        raise BenchmarkError(f"{flag} {file}: there is no such file. Give one that is there.")
    return None


def most_turns(file: Path | None) -> int:
    """The most requests that a session of a JSONL file has; 1 without sessions."""
    if file is None or file.suffix != ".jsonl":
        return 1
    named = Counter(line["session"] for line in _lines(file) if line.get("session"))
    return max(named.values(), default=1)


def read_prompts(
    arguments: argparse.Namespace, tokenizer: Any, count: int, longest: int
) -> list[Request]:
    """So many requests at most, of `longest` tokens at most, in the model's chat template. Raises
    `BenchmarkError` if the dataset can't be read, or holds no such prompt."""
    dataset = f"--dataset {arguments.dataset}"
    file = require_dataset(arguments.dataset, arguments.dataset_path)
    longest = min(longest, arguments.prompt_tokens)
    left_out, found = 0, list[Request]()
    try:
        lines: Iterable[dict[str, Any]]
        if file is not None and file.suffix == ".jsonl":
            lines = _lines(file)
        else:
            texts = _samples(arguments, file, tokenizer, count, longest)
            lines = ({"prompt": text} for text in texts)
        for line in lines:
            request = request_of(line, tokenizer, plain=arguments.dataset == "random")
            ids = request.prompt["prompt_token_ids"]
            if arguments.dataset == "random":
                del ids[longest:]
            fits = 0 < len(ids) <= longest
            left_out, found = left_out + (not fits), found + [request] * fits
            if len(found) == count:
                break
    except BenchmarkError:
        raise
    except Exception as error:  # Of vLLM's readers, of JSON, of what the Hub's client lacks.
        raise BenchmarkError(f"{dataset} can't be read: {type(error).__name__}: {error}") from error
    more = "raise --prompt-tokens or --max-model-len."
    if not found:
        raise BenchmarkError(
            f"{dataset} has no prompt of 1 to {longest} tokens: give another, or {more}"
        )
    if left_out:
        print(f"{left_out} prompts are not of 1 to {longest} tokens, and left out: {more}")
    return found


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    # VLLM's own reader needs pandas, which vLLM doesn't bring.
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip():
            read = json.loads(line)
            if not isinstance(read, dict) or not (
                isinstance(read.get("prompt"), str) or isinstance(read.get("messages"), list)
            ):
                raise BenchmarkError(
                    f'--dataset {file}, line {number}: there is no text named "prompt": write '
                    '{"prompt": "..."} or {"messages": [...]} in each line.'
                )
            wrong = [
                name for name, kind in MORE.items() if not isinstance(read.get(name, kind()), kind)
            ]
            if wrong:
                raise BenchmarkError(
                    f"--dataset {file}, line {number}: {wrong[0]} is {read[wrong[0]]!r}: give "
                    f"{MORE[wrong[0]].__name__}, or leave it out."
                )
            yield read


def request_of(line: dict[str, Any], tokenizer: Any, plain: bool = False) -> Request:
    """The request of a line, which may have `MORE`; `plain` asks for no chat template. Raises
    `BenchmarkError` if the model's chat template refuses the messages."""
    prompt: dict[str, Any] = {"prompt_token_ids": _tokens(line, tokenizer, plain)}
    if line.get("cache_salt"):
        prompt["cache_salt"] = line["cache_salt"]
    more = (line.get(name) for name in ("output_tokens", "session", "schema", "prediction"))
    return Request(prompt, *more)


def _samples(
    arguments: argparse.Namespace, file: Path | None, tokenizer: Any, count: int, longest: int
) -> list[str]:
    """Texts of one of vLLM's datasets, which its own benchmarks would take."""
    from vllm.benchmarks.datasets import add_dataset_parser, get_samples
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    named = "sharegpt" if file is not None else arguments.dataset
    path = [] if named == "random" else ["--dataset-path", str(file or named)]
    parser = FlexibleArgumentParser()
    add_dataset_parser(parser)
    given = ["--dataset-name", named if named in ("sharegpt", "random") else "hf", *path]
    given += ["--num-prompts", str(count), "--no-oversample", "--skip-chat-template"]
    given += ["--random-input-len", str(longest), "--sharegpt-output-len", str(arguments.tokens)]
    given += ["--hf-output-len", str(arguments.tokens)]
    read = parser.parse_args(given)
    read.backend = "vllm"
    return [sample.prompt for sample in get_samples(read, tokenizer)]


def _tokens(line: dict[str, Any], tokenizer: Any, plain: bool) -> list[int]:
    if plain or not getattr(tokenizer, "chat_template", None):
        texts = [str(each.get("content") or "") for each in line.get("messages", ())]
        return list(tokenizer.encode(line.get("prompt") or "\n".join(texts)))
    asked = line.get("messages") or [{"role": "user", "content": line["prompt"]}]
    more = {"tools": line["tools"]} if line.get("tools") else {}
    try:
        whole = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, tokenize=False, **more
        )
    except Exception as error:  # A template raises what it likes.
        raise BenchmarkError(
            f"--dataset: the model's chat template refuses messages of "
            f"{', '.join(dict.fromkeys(str(each.get('role')) for each in asked))} ({error}): leave "
            '"messages" out of the lines, so that "prompt" is asked.'
        ) from error
    # The template writes the special tokens itself.
    return list(tokenizer.encode(whole, add_special_tokens=False))
