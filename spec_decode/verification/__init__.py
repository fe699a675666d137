"""The walk over a verified tree, and what one step of it shares."""
