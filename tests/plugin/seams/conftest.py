"""Tests of the ledger change vLLM's files while a process runs."""

import pytest

from vllm_graft.seams import compare


@pytest.fixture(autouse=True)
def _read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_installed", compare._installed.__wrapped__)
