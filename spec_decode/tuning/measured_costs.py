"""What steps cost, from when the workers have measured it until the scheduler is built."""

from __future__ import annotations

from vllm_graft.spec_decode.chunking.handover import Handover
from vllm_graft.spec_decode.tuning.step_times import Costs

MEASURED: Handover[Costs] = Handover()
"""The costs of each engine's steps."""
