"""``python -m vllm_graft``."""

from vllm_graft.cli import main

raise SystemExit(main())
