"""Where the small trained pair lies that the repository has: a target, an EAGLE-3 head, prompts."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[1] / "tests" / "pair"
