"""Which versions of vLLM are known."""

import pytest

from vllm_graft.base.errors import SeamError
from vllm_graft.seams import versions
from vllm_graft.seams.ledger.entry import minor_of


@pytest.mark.parametrize(
    ("version", "old"), [("0.31.5", True), ("0.9.0", True), ("0.32.0", False), ("1.0.0", False)]
)
def test_an_older_vllm_is_not_known(version: str, old: bool) -> None:
    assert versions.is_too_old(version) is old


@pytest.mark.parametrize("version", ["", "dev", "main.x"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(SeamError, match="no version"):
        minor_of(version)
