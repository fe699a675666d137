"""Commands, keys and files of the documentation are ones that exist."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.plugin.test_docs import PAGES, ROOT, name_of
from vllm_graft.base.decision import PRESET, PRESETS
from vllm_graft.bench import BENCHMARKS
from vllm_graft.cli import APART, make_parser
from vllm_graft.config import GraftConfig

EXAMPLES = ROOT / "docs" / "examples"
INSTRUCTIONS = {"ARG", "FROM", "COPY", "RUN", "ENTRYPOINT", "ENV", "USER", "LABEL", "WORKDIR"}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a page's blocks of commands."""
    for block in re.findall(r"^ *```(?:shell|bash|)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            if re.match(r" *vllm-graft (?!\d)[\w-]+", line):
                yield shlex.split(line, comments=True)
            elif re.match(r" *vllm [a-z]+", line):
                yield line.split()  # Its JSON may go on in the next line.


def problem_of(words: list[str]) -> str:
    """Say what is wrong with a command of ours; empty if nothing is."""
    program, command, *rest = words
    known = {**make_parser()._subparsers._group_actions[0].choices}  # type: ignore[union-attr, dict-item]
    if program == "vllm":
        return ""
    if command.startswith("-"):
        return "" if command == "--version" else f"no option {command}"
    if command not in known:
        return f"no command {command}"
    if command == "bench":
        return "" if not rest or rest[0].startswith("-") or rest[0] in BENCHMARKS else rest[0]
    if command in APART:
        return ""
    options = {option for action in known[command]._actions for option in action.option_strings}
    unknown = [each for each in rest if each.startswith("--") and each.split("=")[0] not in options]
    return f"{command} has no {unknown}" if unknown else ""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    problems = {" ".join(words): problem_of(words) for words in commands(page.read_text())}
    assert {command: problem for command, problem in problems.items() if problem} == {}


def test_commands_are_found_and_wrong_ones_noticed() -> None:
    found = [words for page in PAGES for words in commands(page.read_text())]
    assert len(found) > 10
    assert {words[0] for words in found} == {"vllm", "vllm-graft"}
    assert problem_of(["vllm-graft", "docter"])
    assert problem_of(["vllm-graft", "doctor", "--wheels", "x"])
    assert problem_of(["vllm-graft", "bench", "tres"])


def keys(text: str) -> set[str]:
    return set(re.findall(r"--additional-config\.graft((?:\.\w+)+)", text))


def is_key(path: str) -> bool:
    model: Any = GraftConfig
    for name in path.strip(".").split("."):
        field = getattr(model, "model_fields", {}).get(name)
        if field is None:
            return False
        model = next(iter(getattr(field.annotation, "__args__", (None,))))
    return True


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_keys_exist(page: Path) -> None:
    text = page.read_text()
    assert {key for key in keys(text) if not is_key(key)} <= {f".{PRESET}"}
    presets = set(re.findall(rf"--additional-config\.graft(?:\.{PRESET})? (\w+)", text))
    assert presets <= {*PRESETS}


def test_a_wrong_key_is_noticed() -> None:
    assert keys("x --additional-config.graft.tree.topkk 3") == {".tree.topkk"}
    assert not is_key(".tree.topkk")
    assert is_key(".tree.topk")


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    lines = [line for line in dockerfile.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def test_the_dockerfile_is_one() -> None:
    found = instructions((EXAMPLES / "Dockerfile").read_text())
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert [name for name, _ in found][:2] == ["ARG", "FROM"]
    [entry] = [json.loads(rest) for name, rest in found if name == "ENTRYPOINT"]
    assert entry == ["vllm", "serve"]
    for _, rest in ((name, rest) for name, rest in found if name == "RUN"):
        assert shlex.split(rest.replace("&&", ";"))
    assert instructions("FORM x")[0][0] not in INSTRUCTIONS


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=name_of
)
def test_issue_forms_are_well_formed(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    if form.name == "config.yml":
        assert content == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= content.keys()
    ids = [part["id"] for part in content["body"]]
    assert len(set(ids)) == len(ids)
    for part in content["body"]:
        assert part["type"] in {"textarea", "input", "dropdown", "checkboxes", "markdown"}
        assert part["attributes"]["label"]


def test_the_citation_is_well_formed() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"title", "message", "authors", "version", "license"} <= citation.keys()
