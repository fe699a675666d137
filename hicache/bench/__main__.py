"""`python -m vllm_graft.hicache.bench`."""

import sys

from vllm_graft.hicache.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
