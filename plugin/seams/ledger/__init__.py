"""The ledger: every vLLM symbol that we touch or rely on, once, with what we expect of it.

To add one, add a row to the file of the part that needs it; :mod:`vllm_graft.seams.compare` compares.
Symbols are named by the path that we import them from. A test looks through our sources for imports
that are not listed. It stands below the parts, as the doctor reads it without importing any of them.
"""

from __future__ import annotations

from vllm_graft.seams.ledger.block_seams import BLOCK
from vllm_graft.seams.ledger.cache_seams import CACHE
from vllm_graft.seams.ledger.core_seams import CORE
from vllm_graft.seams.ledger.draft_seams import DRAFT
from vllm_graft.seams.ledger.drafter_seams import GEMMA4, MTP, NGRAM
from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.seams.ledger.history_seams import HISTORY
from vllm_graft.seams.ledger.metrics_seams import METRICS
from vllm_graft.seams.ledger.plan_seams import PLAN
from vllm_graft.seams.ledger.recurrent_seams import RECURRENT
from vllm_graft.seams.ledger.tool_seams import TOOL
from vllm_graft.seams.ledger.tree_seams import TREE
from vllm_graft.seams.ledger.vision_seams import VISION

TESTED_VLLM = ("0.32", "0.33")
"""Minor versions of vLLM that every part was tested with, the oldest first."""

LEDGER: tuple[Seam, ...] = (
    *CORE,
    *TREE,
    *HISTORY,
    *MTP,
    *GEMMA4,
    *NGRAM,
    *BLOCK,
    *RECURRENT,
    *DRAFT,
    *VISION,
    *TOOL,
    *CACHE,
    *METRICS,
    *PLAN,
)
