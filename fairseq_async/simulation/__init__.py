"""Simulation: the real server and rules under a virtual clock, and recorded runs repeated."""
