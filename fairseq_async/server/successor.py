"""A process that goes on where a server has died: a new one, or the standby that has waited for that."""

import subprocess
import threading

BEGIN = b"s"  # what a standby reads from its stdin when it is to become the server
Started = tuple["subprocess.Popen[bytes]", threading.Thread]  # a process, and the thread that prints its notices


class Successor:
    """A process that goes on from the newest snapshot, or waits to do so.

    Args:
        report: descriptor at which it names the snapshot, or an error; closed by this object.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", printing: threading.Thread, report: int) -> None:
        self.process, self.printing, self._report = process, printing, open(report)

    def begin(self) -> bool:
        """Lets a standby, which may still be importing, become the server; returns whether it is alive."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(BEGIN)
            self.process.stdin.flush()
        except OSError:
            return False
        return self.process.poll() is None

    def report(self) -> str:
        """Waits until it goes on; returns the name of its snapshot, an error, or nothing if it has died."""
        with self._report:
            return self._report.read()

    def end(self) -> None:
        """Kills a standby."""
        self._report.close()
        self.process.kill()
        self.process.wait()
