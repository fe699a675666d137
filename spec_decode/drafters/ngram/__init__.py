"""The drafter without a draft model."""
