"""Vision encoders, eager against stock graphs against ours: `vllm-graft bench vit` from a checkout.

python benchmarks/vit.py --seconds 240 --json vit.json
"""

from __future__ import annotations

import sys

from vllm_graft.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "vit", *sys.argv[1:]]))
