"""The whole ledger, in one tuple."""

import pkgutil

from vllm_graft.seams.ledger.cache_seams import CACHE
from vllm_graft.seams.ledger.core_seams import CORE, ENGINE, METRICS
from vllm_graft.seams.ledger.drafter_seams import BLOCK, GEMMA4, MTP, NGRAM
from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.seams.ledger.graph_seams import DRAFT, VISION
from vllm_graft.seams.ledger.tool_seams import LEARN, PLAN, TOOL
from vllm_graft.seams.ledger.tree_seams import HISTORY, TREE

ROOMS = (
    "vllm_graft.spec_decode.targets.dense.dense_seams:DENSE",
    "vllm_graft.spec_decode.targets.latent.latent_seams:LATENT",
    "vllm_graft.spec_decode.targets.recurrent.recurrent_seams:RECURRENT",
)
"""Rows that lie in a room of their own, beside what needs them. Such a file imports nothing but the
notation, so that no part is imported with it."""

LEDGER: tuple[Seam, ...] = (
    *CORE, *ENGINE, *TREE, *HISTORY, *MTP, *GEMMA4, *NGRAM, *BLOCK,
    *(seam for room in ROOMS for seam in pkgutil.resolve_name(room)),
    *DRAFT, *VISION, *TOOL, *CACHE, *METRICS, *PLAN, *LEARN,
)  # fmt: skip
