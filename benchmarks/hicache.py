"""Host KV-cache connectors side by side; see `vllm_graft.hicache.bench.command`.

    python benchmarks/hicache.py --model MODEL --out OUT
"""

from __future__ import annotations

import sys

from vllm_graft.hicache.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
