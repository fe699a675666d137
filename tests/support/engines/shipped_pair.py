"""The folder of the small trained pair of the tests: a target, an EAGLE-3 head, and prompts."""

from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[2] / "pair"
