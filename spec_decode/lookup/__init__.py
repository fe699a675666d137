"""Drafts that are looked up in a request's own text."""
