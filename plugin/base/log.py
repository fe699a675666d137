"""The logger, and lines that a process prints once."""

import logging
import sys

# vLLM installs handlers on the logger "vllm" only: a child of it prints, "vllm_graft" would not.
logger = logging.getLogger("vllm.graft")

MOST = 16
"""Different messages that one place of the code logs. What a request or a foreign program holds may
stand in them, and must not decide how large a log grows."""

_LONGEST = 4096
"""Characters of a message."""


class Once:
    """Logs each message, at one level, the first time that this process asks for it."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._said: dict[tuple[str, int], set[str]] = {}

    def __call__(self, message: str, *, most: int = MOST) -> None:
        """Log a message, shortened if too long; the calling line logs ``most`` different ones."""
        caller = sys._getframe(1)
        said = self._said.setdefault((caller.f_code.co_filename, caller.f_lineno), set())
        if len(message) > _LONGEST:
            message = message[:_LONGEST] + "..."
        if message not in said and len(said) < most:
            said.add(message)
            logger.log(self._level, message, stacklevel=2)

    def cache_clear(self) -> None:
        """Forget what was said; for tests."""
        self._said.clear()


info_once = Once(logging.INFO)
warning_once = Once(logging.WARNING)
