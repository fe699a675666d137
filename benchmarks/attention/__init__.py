"""Times tree attention against the platform's own kernels, in the layer shapes of known models."""
