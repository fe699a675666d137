"""Our store and our eviction policies for vLLM's own OffloadingConnector."""
