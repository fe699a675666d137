"""The end-to-end vision benchmark in its tiny form, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import vit_serve
from benchmarks.vit_serve import Answer, Arm

SCRIPT = Path(vit_serve.__file__)


def answer(tokens: list[int], margin: float = 1.0) -> Answer:
    return Answer(64, tokens, [margin] * len(tokens), 2.0, 0.1)


def test_texts_part_at_near_ties_or_elsewhere() -> None:
    expected = [answer([1, 2, 3]), answer([4, 5, 6], 0.01), answer([7, 8, 9])]
    found = [answer([1, 2, 3]), answer([4, 9, 9], 0.02), answer([7, 8, 1])]
    tie, other = vit_serve.differences(found, expected)
    assert (tie.request, tie.position, tie.margin, tie.near_tie) == (1, 1, 0.01, True)
    assert (other.request, other.position, other.near_tie) == (2, 2, False)
    lines = vit_serve.table([Arm("ours", 1.0, found, differences=[tie, other])], [64])
    assert "1 of 3 texts as without graphs, 1 part at near-ties, 1 elsewhere" in lines[3]
    assert lines[2] == "| 64 | 2.00 |"


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_text_is_the_same_in_all_arms(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, "-P", str(SCRIPT), "--tiny", "--arms", "off", "stock", "ours"]
    command += ["--rounds", "1", "--warm", "2", "--tokens", "4", "--sizes", "64", "96"]
    done = subprocess.run(
        [*command, "--json", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    arms = {arm["name"]: arm for arm in json.loads(file.read_text())}
    texts = {name: [a["tokens"] for a in arm["answers"]] for name, arm in arms.items()}
    assert texts["ours"] == texts["stock"] == texts["off"]
    assert len({tuple(tokens) for tokens in texts["off"]}) == 2
    assert all(a["encoder_ms"] > 0 for arm in arms.values() for a in arm["answers"])
    # Each size is seen, captured, and replayed.
    assert arms["ours"]["counters"]["items"] == {"bucket": 2, "eager": 2, "exact": 2}
