"""The vLLM symbols that we touch: the ledger, its comparison with vLLM, and how we hook."""
