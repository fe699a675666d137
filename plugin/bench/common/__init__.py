"""Code that all benchmarks share: engines, answers, timing, reports."""
