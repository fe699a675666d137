"""Tiny random checkpoints."""
