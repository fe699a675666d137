"""The rank's side: it executes what the scheduler plans, and reports."""
