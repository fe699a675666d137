"""Errors that users can see. None is a ``ValueError``: pydantic, which validates vLLM's
configuration, would wrap it and hide the flag behind "1 validation error for VllmConfig"."""


class GraftError(Exception):
    """Base of every error raised on purpose by vllm-graft."""


class ConfigError(GraftError):
    """A flag is misspelt, out of range, or cannot be combined with another one."""


class HookError(GraftError):
    """What a plugin provides is wrong, or cannot be loaded."""


class EntryError(ConfigError, HookError):
    """The configuration names an entry that nobody, or more than one, offers or can load."""


class SeamError(GraftError):
    """A vLLM symbol that we touch is missing or has changed."""


class NotActiveError(GraftError):
    """A part was asked for, and is not running."""
