"""How functions are marked as hooks."""

import pluggy

hookspec = pluggy.HookspecMarker("vllm_graft")
"""Marks our hook specifications; only :mod:`vllm_graft.hooks.hookspecs` uses it."""

hookimpl = pluggy.HookimplMarker("vllm_graft")
"""Marks a third party's (and our own) hook implementations."""
