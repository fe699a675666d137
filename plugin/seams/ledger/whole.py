"""The whole ledger, in one tuple."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator

from vllm_graft.seams.ledger.block_seams import BLOCK
from vllm_graft.seams.ledger.cache_seams import CACHE
from vllm_graft.seams.ledger.core_seams import CORE
from vllm_graft.seams.ledger.draft_seams import DRAFT
from vllm_graft.seams.ledger.drafter_seams import GEMMA4, MTP, NGRAM
from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.seams.ledger.history_seams import HISTORY
from vllm_graft.seams.ledger.metrics_seams import METRICS
from vllm_graft.seams.ledger.plan_seams import PLAN
from vllm_graft.seams.ledger.tool_seams import TOOL
from vllm_graft.seams.ledger.tree_seams import TREE
from vllm_graft.seams.ledger.vision_seams import VISION

ROOMS = (
    "vllm_graft.spec_decode.targets.dense.dense_seams:DENSE",
    "vllm_graft.spec_decode.targets.latent.latent_seams:LATENT",
    "vllm_graft.spec_decode.targets.recurrent.recurrent_seams:RECURRENT",
)
"""Rows that lie in a room of their own, beside what needs them. Such a file imports nothing but the
notation, so that no part is imported with it."""


def _of_rooms() -> Iterator[Seam]:
    for room in ROOMS:
        yield from pkgutil.resolve_name(room)


LEDGER: tuple[Seam, ...] = (
    *CORE,
    *TREE,
    *HISTORY,
    *MTP,
    *GEMMA4,
    *NGRAM,
    *BLOCK,
    *_of_rooms(),
    *DRAFT,
    *VISION,
    *TOOL,
    *CACHE,
    *METRICS,
    *PLAN,
)
