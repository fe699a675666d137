"""What pairs of block drafts have in common: the target's last-token term, and texts for them."""

from __future__ import annotations

FROM_LAST = 0.4
"""How much the last token counts to the target: what DFlash has no term for."""

TEXTS = [
    "def main(argv):\n    return [int(x) for x in argv]",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "x = [int(y) for y in z if y is not None]",
]
