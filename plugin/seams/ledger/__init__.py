"""The ledger: every vLLM symbol that we touch or rely on, once, with what we expect of it. To add
one, add a row to the file of the part that needs it; files of target families lie in their rooms.
Symbols are named by the path that we import them from. A test looks for imports that are not
listed. The ledger stands below the parts, as the doctor reads it without importing any of them."""

TESTED_VLLM = ("0.32", "0.33")
"""Minor versions of vLLM that every part was tested with, the oldest first."""
