"""Our parts in vLLM's own OffloadingConnector."""
