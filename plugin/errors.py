"""Errors of vllm-graft."""


class GraftError(Exception):
    """Base of every error that vllm-graft raises on purpose.

    It is no ``ValueError``: pydantic would wrap it and hide its message.
    """
