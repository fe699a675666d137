"""Speculative decoding with trees of drafts."""
