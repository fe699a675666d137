"""The trained pair."""

from tests.support.engines.pair_fixtures import pair, samples

__all__ = ["pair", "samples"]
