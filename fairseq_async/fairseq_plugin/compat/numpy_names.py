"""Names that fairseq uses and NumPy no longer has."""

from types import SimpleNamespace

import numpy as np

_REMOVED = {
    "compat": SimpleNamespace(long=int),  # by --sample-break-mode eos and --num-batch-buckets
    "float": float,  # by models with a CRF
    "int": int,  # by tasks that mask audio
}


def restore_names() -> None:
    """Gives NumPy the names back that it has had for Python's own types."""
    for name, value in _REMOVED.items():
        vars(np).setdefault(name, value)
