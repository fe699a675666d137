"""Vision encoders as towers: what the runner has to know of a model."""
