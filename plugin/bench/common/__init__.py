"""What all benchmarks share: engines, answers, timing, reports."""
