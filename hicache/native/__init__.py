"""Our store for vLLM's own OffloadingConnector."""
