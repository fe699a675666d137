"""The trained pair."""

from tests.support.engines.pair_fixtures import expected, pair, samples

__all__ = ["expected", "pair", "samples"]
