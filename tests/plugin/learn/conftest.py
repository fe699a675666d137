"""The trained pair."""

from tests.support.engines.pair_fixtures import device, pair, samples

__all__ = ["device", "pair", "samples"]
