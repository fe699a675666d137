"""Workloads that people have, made of public data: the same ones by each seed."""
