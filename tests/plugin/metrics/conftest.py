"""The pair, requests to it, and the answers of the target alone."""

from tests.support.engines.pair_fixtures import expected, pair, samples

__all__ = ["expected", "pair", "samples"]
