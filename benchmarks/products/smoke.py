"""Runs one small product of each kind in a process of its own, before the search does.

A kernel that reads where it must not ends all work of its process on the GPU, and one that never
ends keeps it: neither should cost the search. It prints one line of JSON: the failures by kind.
"""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from benchmarks.products.plan import Plan
from benchmarks.products.product_call import RELATIVE, Space, multiply
from benchmarks.products.shapes import Product
from vllm_graft.base.values import reason_of

LIMIT = 90
"""Seconds of the process."""

PRODUCT = Product("small", 512, 2048)

PLANS = {
    "tile": (
        Plan(False, 64, 128, 3, 4, splits=2, ahead=2),
        Plan(False, 32, 64, 3, 4, flip=False, resident=1, ahead=2, roll=True),
    ),
    "deep": (
        Plan(True, 64, 128, 4, 4, ahead=2),
        Plan(True, 128, 64, 4, 8, resident=1, ahead=2),
        Plan(True, 128, 64, 3, 4, splits=3, overlapped=False),
    ),
}


def failure(plan: Plan, rows: int, device: str) -> str:
    """What is wrong with a plan; empty if nothing."""
    x = torch.randn(rows, PRODUCT.depth, device=device).to(torch.bfloat16)
    weight = torch.randn(PRODUCT.columns, PRODUCT.depth, device=device).to(torch.bfloat16)
    out = torch.full((rows, PRODUCT.columns), float("nan"), dtype=torch.bfloat16, device=device)
    space = Space.allocate((PRODUCT,), 132, device)
    expected = x.float() @ weight.float().t()
    # The second call finds the counters as the first has left them.
    for _ in range(2):
        multiply(plan, PRODUCT, x, weight, out.fill_(float("nan")), space)
        error = float((out.float() - expected).norm() / expected.norm())
        if not error <= RELATIVE:
            return f"{plan.short}, {rows} rows: relative error {error:.4f}"
    return "" if not space.arrived.any() else f"{plan.short}: counters are left"


def failures(kind: str, device: str, rows: tuple[int, ...] = (3, 32)) -> list[str]:
    """What is wrong with a kind's plans."""
    found = []
    for plan in PLANS[kind]:
        for each in rows:
            try:
                found.append(failure(plan, each, device))
            except Exception as error:  # Any error of a kernel is a line of the report.
                found.append(f"{plan.short}, {each} rows: {reason_of(error)}")
    return [each for each in found if each]


def start(kind: str) -> subprocess.Popen[str]:
    """A process that tries a kind."""
    command = [sys.executable, "-m", "benchmarks.products.smoke", kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str], limit: float = LIMIT) -> list[str]:
    """What is wrong with the kind that a process tries; one that never ends is ended."""
    try:
        said, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        return [f"did not end within {limit:.0f} s"]
    if process.returncode:
        return [f"status {process.returncode}: {errors.strip()[-300:]}"]
    return [str(each) for each in json.loads(said.splitlines()[-1])]


if __name__ == "__main__":
    print(json.dumps(failures(sys.argv[1], "cuda")))
