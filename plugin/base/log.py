"""The logger, and lines that a process prints once."""

from __future__ import annotations

import functools
import logging

# vLLM installs handlers on the logger "vllm" only: a child of it prints, "vllm_graft" would not.
logger = logging.getLogger("vllm.graft")


@functools.cache
def info_once(message: str) -> None:
    """Log ``message`` at INFO the first time that this process asks for it."""
    logger.info(message, stacklevel=2)


@functools.cache
def warning_once(message: str) -> None:
    """Log ``message`` at WARNING the first time that this process asks for it."""
    logger.warning(message, stacklevel=2)
