"""``python exec_with_parent.py PARENT COMMAND ...``: becomes the command, which the kernel ends with its parent.

Ray kills an actor without warning, and the process that the actor has started must not go on beside its successor's.
To set this between fork and exec would run Python code in a fork of Ray's many threads. So this is a program by itself,
and imports only the standard library, to be fast.
"""

import ctypes
import os
import signal
import sys

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, which survives exec
    if os.getppid() == int(sys.argv[1]):
        os.execv(sys.argv[2], sys.argv[2:])
