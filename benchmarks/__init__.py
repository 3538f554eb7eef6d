"""Measurements, run as ``python -m benchmarks.<name>``; results of record live in ``results/``."""
