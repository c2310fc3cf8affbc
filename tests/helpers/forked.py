"""Programs of Python that start as forks of a process that has imported the frameworks (``forks.py``).

To import torch takes two seconds of a core, fairseq, DeepSpeed or transformers as many more, and the tests start many
processes. With ``Forked`` in place of ``subprocess.Popen`` such a process is a fork instead. It is a child of the
process that asks for it, with the arguments, variables, directory, session and files that an exec would give it.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from threading import Lock
from typing import ClassVar

SCRIPTS = {each.name: each for each in entry_points(group="console_scripts")}
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER
_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_asking = Lock()


def is_python(path: str) -> bool:
    """Whether a program is one of Python's."""
    name = os.path.basename(path)
    return name in ("python", "python3", os.path.basename(sys.executable), "deepspeed", *SCRIPTS)


def ask(
    folder: Path, arguments: Sequence[str], variables: Mapping[str, str], files: Mapping[int, int], **others: object
) -> int:
    """The new process, a child of this one; ``files`` has ours by the numbers that it shall have."""
    asked = {
        "arguments": arguments,
        "variables": dict(variables),
        "files": list(files),
        "parent": os.getpid(),
        **others,
    }
    text = json.dumps(asked).encode()
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a process of which we do not know would be left over
    with _asking, socket.socket(socket.AF_UNIX) as asking:
        prctl = ctypes.CDLL(None).prctl
        prctl(_ADOPT, 1, 0, 0, 0)  # it comes from a process that ends at once: then we are its parent
        try:
            asking.connect(str(folder / "socket"))
            asking.sendall(len(text).to_bytes(4, "big"))
            socket.send_fds(asking, [text[:1]], list(files.values()))
            asking.sendall(text[1:])
            answer = asking.recv(4, socket.MSG_WAITALL)
        finally:
            prctl(_ADOPT, 0, 0, 0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, kept)
    assert len(answer) == 4, "the process that is forked has ended"
    return int.from_bytes(answer, "big")


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A process: where it is a program of Python's, a fork of the process of which ``folder_for`` gives the folder.

    ``ip netns exec NAME`` before a program is its network namespace.
    """

    folder_for: ClassVar[Callable[[Sequence[str]], Path | None]]  # None: it is executed

    def _execute_child(  # type: ignore[no-untyped-def]  # as Python 3.10 to 3.13 call it
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, *group,
    ) -> None:  # fmt: skip
        variables = {
            os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if env is None else env).items()
        }
        words = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
        words = [os.fsdecode(word) for word in words]
        network, words = (words[3], words[4:]) if words[1:3] == ["netns", "exec"] else (None, words)
        can_be = is_python(words[0]) and preexec_fn is None and not shell and close_fds and "-c" not in words[:3]
        folder = type(self).folder_for(words) if can_be else None
        if folder is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, *group,
            )  # fmt: skip
            return
        try:
            standard = (p2cread, c2pwrite, errwrite)
            files = {number: number if file == -1 else file for number, file in enumerate(standard)}
            files |= {file: file for file in pass_fds}
            directory = os.path.abspath(cwd or os.getcwd())
            session = bool(start_new_session)
            place = {"directory": directory, "session": session, "network": network}
            self.pid = ask(folder, words, variables, files, **place)
            self._child_created = True
        finally:
            self._close_pipe_fds(  # type: ignore[attr-defined]
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
            )
