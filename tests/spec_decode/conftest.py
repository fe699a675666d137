"""Fixtures of all tests of trees and draft chains."""

from __future__ import annotations

import pytest

from tests.support.pair_fixtures import expected, pair, samples

__all__ = ["expected", "flash_attention_3", "pair", "samples"]


@pytest.fixture
def flash_attention_3() -> None:
    """Skip where vLLM has none."""
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    if not is_fa_version_supported(3):
        pytest.skip("needs FlashAttention 3, that is a Hopper GPU")
