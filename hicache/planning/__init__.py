"""The scheduler's side: what to load, what to store, and when."""
