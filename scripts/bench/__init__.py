"""Benchmarks: programs that print what they compare, both sides of one run, and the machine they ran on."""
