"""``fairseq-async``: the command line.

Each command imports what it needs when it is called, and says what is wrong with its arguments before that: torch and
matplotlib take seconds to import.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command line; Ctrl-C ends it without a traceback, also while its own modules are imported."""
    try:
        from fairseq_async.cli import program  # here, where Ctrl-C is caught
    except KeyboardInterrupt:
        sys.exit(130)
    program.main()
