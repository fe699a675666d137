"""`python -m vllm_graft.bench.hicache`."""

import sys

from vllm_graft.bench.hicache.command import main

if __name__ == "__main__":
    sys.exit(main())
