"""Benchmarks: programs that print what they compare, on which machine, and both sides of one run."""
