"""The vLLM symbols that we touch: the ledger, its comparison with the installed vLLM, and how we hook."""
