"""Tiny random checkpoints and vision towers."""
