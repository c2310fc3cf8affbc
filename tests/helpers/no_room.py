"""A stream to a file on a full disk."""

import errno
import io
import os


class NoRoom(io.StringIO):
    """Fails at each write as a file on a full disk does, or with another error."""

    def __init__(self, error: int = errno.ENOSPC) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise OSError(self.error, os.strerror(self.error))
