"""Tests that every implementation of a hook has to pass."""
