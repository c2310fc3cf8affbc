"""Runs the ranks of one worker on this machine: ``ranks.py N COMMAND …``. When one dies, all end: the worker has died.

Does not import torch, whose memory each worker would have once more.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from fairseq_async.environment import JOINS, WORKER
from fairseq_async.errors import USER_ERROR
from fairseq_async.launch.command.programs import executing
from fairseq_async.options.addresses import LOOPBACK, free_port

_PAUSE = 0.05
_ENDING = 10.0  # seconds for the other ranks to end after rank 0 has ended in order


def main() -> None:
    """Ends as the rank whose end has ended the worker."""
    launcher = None if os.environ.get(WORKER) == JOINS else os.getppid()  # whose terminal may close before the run ends
    line = sys.argv[2:]
    with executing(line[0]):
        ranks = _start(line, int(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda number, _: _signal(ranks, number))
    try:
        code = _wait(ranks, launcher)
    except KeyboardInterrupt:  # Ctrl-C at a worker that has joined
        code = 130
    finally:
        _signal(ranks, signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _start(line: Sequence[str], count: int) -> list[subprocess.Popen[bytes]]:
    """Starts the ranks with torchrun's variables, by which libraries find their world."""
    world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(count))
    world |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    numbers = (dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(count))
    return [subprocess.Popen(line, env=os.environ | world | own) for own in numbers]


def _wait(ranks: Sequence[subprocess.Popen[bytes]], launcher: int | None) -> int:
    """Waits until all ranks have ended in order, or one with an error, or the launcher is gone; returns the code.

    Of ranks that end together, a user's mistake comes first, then a signal: the others end because theirs is gone. How
    another rank ends after rank 0 has ended in order does not matter, since rank 0 saves.
    """
    deadline = float("inf")
    while launcher in (None, os.getppid()) and time.monotonic() < deadline:
        codes = [rank.poll() for rank in ranks]
        if codes[0] == 0:
            deadline = min(deadline, time.monotonic() + _ENDING)
        elif failed := [code for code in codes if code]:
            return min(failed, key=lambda code: (code != USER_ERROR, code))
        if None not in codes:
            return 0
        time.sleep(_PAUSE)
    return 0


def _signal(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        rank.send_signal(number)  # nothing, where the rank has ended


if __name__ == "__main__":
    main()
