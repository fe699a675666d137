"""Tests of `benchmarks.acceptance_rules`."""
