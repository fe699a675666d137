"""The ground floor: errors, logging, options and counters. It imports nothing of ours."""
