"""Fixtures of the tests that ask servers for what the target alone answers."""

from __future__ import annotations

from tests.support.pair_fixtures import expected, pair, samples

__all__ = ["expected", "pair", "samples"]
