"""A line on the terminal while DeepSpeed waits for its compiled operators; torch itself waits in silence.

torch compiles one operator in one process, and all others wait for its lock, a file. A process that is killed while it
compiles leaves the file, at which every later job on this machine waits forever.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

from torch.utils.cpp_extension import get_default_build_root

_SECONDS = 60.0  # an operator compiles for about half a minute


@contextmanager
def waiting_for_compilers(seconds: float = _SECONDS) -> Iterator[None]:
    """Names the locks of torch's compilers on the terminal if the block takes longer than this many seconds."""
    timer = Timer(seconds, _name_locks)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def locks() -> list[Path]:
    """Returns the locks of operators that are being compiled, or were when their compiler was killed."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return sorted(lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern))


def _name_locks() -> None:
    for lock in locks():
        print(
            f"fairseq-async: DeepSpeed waits for the compiled operator {lock.parent.name}. If no process compiles it "
            f"any more (one that is killed leaves its lock), delete {lock}",
            file=sys.stderr,
            flush=True,
        )
