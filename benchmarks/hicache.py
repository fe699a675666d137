"""`vllm-graft bench hicache`, as a script.

python benchmarks/hicache.py --model MODEL --json rows.json
"""

from __future__ import annotations

import sys

from vllm_graft.bench.hicache.command import main

if __name__ == "__main__":
    sys.exit(main())
