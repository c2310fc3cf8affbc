"""Outer optimizers of local SGD."""
