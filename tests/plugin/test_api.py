"""The one module that third parties import from."""

from pathlib import Path

import pytest

from vllm_graft import api


@pytest.mark.parametrize("name", api.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(api, name) is not None


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Scheduler'"):
        _ = api.Scheduler


def test_the_sample_and_the_page_import_from_nowhere_else() -> None:
    root = Path(__file__).parents[2]
    for file in ("tests/sample_plugin/graft_sample.py", "docs/hooks.md"):
        lines = (root / file).read_text().splitlines()
        named = [
            line for line in lines if line.startswith(("from vllm_graft", "import vllm_graft"))
        ]
        assert named
        assert all(line.startswith("from vllm_graft.api import ") for line in named), named
