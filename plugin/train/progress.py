"""The progress bar of a run."""

from __future__ import annotations

from typing import Any

_FORM = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class Progress:
    """A bar on standard error with the share that is done, the time left and some figures.

    Args:
        shows: whether there is one at all.
    """

    def __init__(self, what: str, *, shows: bool) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(total=100, desc=what, bar_format=_FORM, disable=not shows)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, share: float, **figures: object) -> None:
        """Draw it anew, some times a second at most."""
        self._bar.set_postfix(refresh=False, **figures)
        # tqdm looks at the clock itself.
        self._bar.update(min(100.0, round(100 * share, 1)) - self._bar.n)
