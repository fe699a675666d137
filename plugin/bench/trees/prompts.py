"""Prompts of ``vllm-graft bench trees``: a file's, or those of vLLM's own datasets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_graft.bench.common.report import BenchmarkError

SHAREGPT = (
    "https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve/main/"
    "ShareGPT_V3_unfiltered_cleaned_split.json"
)

Prompt = dict[str, list[int]]
"""A prompt as `vllm.LLM` takes it, by its token ids."""


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what is asked."""
    told = (
        'what is asked: a JSONL file with a "prompt" in each line, a JSON file of conversations '
        "as ShareGPT's, 'sharegpt' (with --dataset-path), a dataset of the Hub that vLLM knows, or "
        "'random', which no draft predicts well"
    )
    parser.add_argument("--dataset", required=True, metavar="FILE|NAME", help=told)
    parser.add_argument("--dataset-path", type=Path, metavar="FILE", help="ShareGPT's file")
    told = "tokens of a random prompt; longer ones of a dataset are left out (default: %(default)s)"
    parser.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help=told)


def require_dataset(dataset: str, path: Path | None) -> Path | None:
    """The file of a dataset, None for one without.

    Raises:
        BenchmarkError: the file is not there, or none was given.
    """
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


def read_prompts(
    arguments: argparse.Namespace, tokenizer: Any, count: int, longest: int
) -> list[Prompt]:
    """So many prompts at most, of `longest` tokens at most, in the model's chat template.

    Raises:
        BenchmarkError: the dataset can't be read, or holds no such prompt.
    """
    dataset = f"--dataset {arguments.dataset}"
    file = require_dataset(arguments.dataset, arguments.dataset_path)
    longest = min(longest, arguments.prompt_tokens)
    try:
        if file is not None and file.suffix == ".jsonl":
            texts = _lines(file)
        else:
            texts = iter(_samples(arguments, file, tokenizer, count, longest))
        found: list[Prompt] = []
        for text in texts:
            ids = _tokens(text, tokenizer, plain=arguments.dataset == "random")
            ids = ids[:longest] if arguments.dataset == "random" else ids
            found += [{"prompt_token_ids": ids}] if 0 < len(ids) <= longest else []
            if len(found) == count:
                break
    except BenchmarkError:
        raise
    except Exception as error:  # Of vLLM's readers, of JSON, of what the Hub's client lacks.
        raise BenchmarkError(f"{dataset} can't be read: {type(error).__name__}: {error}") from error
    if not found:
        raise BenchmarkError(
            f"{dataset} has no prompt of 1 to {longest} tokens: give another, or raise "
            "--prompt-tokens or --max-model-len."
        )
    return found


def _lines(file: Path) -> Iterator[str]:
    # VLLM's own reader needs pandas, which vLLM doesn't bring.
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip():
            read = json.loads(line)
            prompt = read.get("prompt") if isinstance(read, dict) else None
            if not isinstance(prompt, str):
                raise BenchmarkError(
                    f'--dataset {file}, line {number}: there is no text named "prompt": write '
                    '{"prompt": "..."} in each line.'
                )
            yield prompt


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


def _tokens(text: str, tokenizer: Any, plain: bool) -> list[int]:
    if plain or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode(text))
    asked = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    # The template writes the special tokens itself.
    return list(tokenizer.encode(whole, add_special_tokens=False))
