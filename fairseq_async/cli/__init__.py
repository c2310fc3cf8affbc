"""``fairseq-async``: the command line.

Each command imports what it needs when it is called, and says what is wrong with its arguments before that: torch and
matplotlib take seconds to import.
"""

from fairseq_async.cli.program import app, main

__all__ = ["app", "main"]
