"""The folder of the small trained pair of the tests: a target, an EAGLE-3 head, and prompts.

They were trained on nothing but the source of Python's standard library, as
``git show 5ccaae04:tests/pair/train.py`` says.
"""

from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[2] / "pair"
