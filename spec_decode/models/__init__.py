"""Facts about the checkpoints of targets and drafts, known from their configurations alone."""
