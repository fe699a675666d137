"""Fixtures of tests that compare servers' answers with those of the target alone."""

from __future__ import annotations

from tests.support.engines.pair_fixtures import expected, pair, samples

__all__ = ["expected", "pair", "samples"]
