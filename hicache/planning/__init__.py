"""The scheduler's side: it decides what to load, what to store, and when."""
