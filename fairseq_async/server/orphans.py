"""No process outlives the one for which it works."""

import ctypes
import os
import signal


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Lets the kernel send this process a signal when its parent ends, however that ends (Linux).

    Args:
        parent: its process; if that has ended already, so does this.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), number)
