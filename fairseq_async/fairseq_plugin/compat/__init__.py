"""Workarounds for fairseq 0.12 under present versions of Python, NumPy and torch, each once and with its reason."""
