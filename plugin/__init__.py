"""vllm-graft: what SGLang is fast for, as a plugin of unmodified vLLM."""

__version__ = "0.32.0a1"


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``."""
