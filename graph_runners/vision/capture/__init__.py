"""Capture and replay with static buffers within a budget; knows neither models nor the engine."""
