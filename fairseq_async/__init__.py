"""Asynchronous training of Transformers, for fairseq and DeepSpeed.

fairseq imports this package as its ``--user-dir``; only then are the optimizers registered with it.
"""

import sys

__version__ = "0.1.0"

if "fairseq" in sys.modules:
    from fairseq_async import fairseq_plugin  # noqa: F401
