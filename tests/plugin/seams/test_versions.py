"""The choice of the engine module for a version of vLLM."""

import pytest

from vllm_graft.base.errors import SeamError
from vllm_graft.seams import versions
from vllm_graft.seams.ledger.entry import minor_of


class Newer(versions.Engine):
    minor = "0.40"


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        ("0.32.0", "0.32"),
        ("0.32.1+cpu", "0.32"),
        ("0.39.2", "0.32"),
        ("0.40.0rc1", "0.40"),
        ("0.41.0", "0.40"),
        ("1.0.0", "0.40"),
    ],
)
def test_the_newest_module_that_is_not_newer(
    version: str, minor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "ENGINES", (versions.V032, Newer))
    assert versions.engine_for(version).minor == minor


@pytest.mark.parametrize("version", ["0.31.5", "0.9.0"])
def test_an_older_vllm_is_refused(version: str) -> None:
    with pytest.raises(SeamError, match=f"vLLM {version} is older"):
        versions.engine_for(version)


@pytest.mark.parametrize("version", ["", "dev", "main.x"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(SeamError, match="no version"):
        minor_of(version)
