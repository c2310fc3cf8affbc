"""Snapshots: the server's whole state on disk, from which a new server goes on after its death."""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import BrokenFileError, RefusedError, disk_error, first_line, is_scarcity, why_not_written
from fairseq_async.exchange.linux import end_with_parent
from fairseq_async.protocol.notices import Journal, Tell, tell_log
from fairseq_async.records.state_files import load_checked, private, save_checked

DIRECTORY = "snapshots"
# suffixes of a snapshot that does not fit, of one that was not asked for, and of one that is proved to be broken
OTHER, _BEFORE, _TORN = ".other", ".before", ".torn"
OF_OTHER_RUNS = (OTHER, _BEFORE)
_KEPT = 2  # snapshots; the last one may be torn by what killed the server
_UNKNOWN = 255  # exit code of a writer whose error has no number of the system's
_PAUSES = (0.2, 0.4, 0.8, 1.6, 3.2)  # seconds before another attempt to read, as where memory is short


def snapshots_in(run_dir: Path) -> list[Path]:
    """Returns the snapshots of a run's directory, in the order of their versions."""
    return sorted(path for path in (run_dir / DIRECTORY).glob("version-*.pt") if path.is_file())


class Snapshots:
    """Takes and reads the snapshots of a run. A child process writes each one while the server goes on: a fork has the
    memory as it was at the fork.

    A snapshot is written under another name and renamed when the disk has it: a file with its own name is whole.

    Args:
        run_dir: the snapshots go to ``snapshots/`` there.
        clock: returns seconds that do not go back.
        tell: passes a line to the user, such as that a snapshot could not be written.
        run: names the run; its server goes on from no other run's snapshot.
    """

    def __init__(
        self, run_dir: Path, clock: Callable[[], float] = time.monotonic, tell: Tell = tell_log, run: str = ""
    ) -> None:
        self.directory, self.clock, self.tell, self.run = run_dir / DIRECTORY, clock, tell, run
        self._child = 0
        self._taken_at: float | None = None
        self._version = self._writing = -1
        self._failed = False
        self._before: Path | None = None
        self.journal = Journal()

    def keep_up(self, state: Callable[[], State], version: int, snapshot_seconds: float) -> None:
        """Takes a snapshot at the beginning, and then when so many seconds have passed."""
        due = self._taken_at is None or self.clock() - self._taken_at >= snapshot_seconds
        if due and version != self._version and not self.busy:
            self._taken_at, self._version = self.clock(), version
            try:
                self.take(state(), version)
            except OSError as error:  # no more processes, no memory for one, or the directory is gone
                self._fail(error)

    def take(self, state: State, version: int) -> None:
        """Begins to write a snapshot; does nothing while the one before is being written.

        Raises:
            OSError: the process cannot be forked, or the directory cannot be made.
        """
        if self.busy:
            return
        self.directory.mkdir(exist_ok=True)
        server = os.getpid()
        self._writing = version
        self._child = os.fork()
        if self._child == 0:
            code = _UNKNOWN
            try:
                end_with_parent(signal.SIGKILL, server)  # a new server must not find what it has taken back
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # connections and locks must end with the server
                torch.set_num_threads(1)  # the threads of OpenMP are not in this process
                self._write(state, version)
                code = 0
            except BaseException as error:
                why = disk_error(error)
                code = why.errno or code if isinstance(why, OSError) else code
                if not self._failed:
                    tell_log(f"writing the snapshot of version {version:,}: {type(why).__name__}: {why}")
            finally:
                os._exit(code)

    @property
    def busy(self) -> bool:
        """Whether a snapshot is being written."""
        return not self._writer_has_ended(os.WNOHANG)

    def wait(self) -> None:
        """Waits until the snapshot that is being written, if any, is whole."""
        self._writer_has_ended(0)

    def _writer_has_ended(self, options: int) -> bool:
        """Whether no snapshot is being written; tells the user if the writer has failed.

        Args:
            options: of ``os.waitpid``: 0 waits for the writer's end.
        """
        if self._child:
            child, status = os.waitpid(self._child, options)
            if not child:
                return False
            self._child = 0
            if status:
                code = os.waitstatus_to_exitcode(status)
                self._fail(OSError(code, os.strerror(code)) if code in errno.errorcode else None)
            else:
                self._failed = False
                self.journal("snapshot", f"the snapshot of version {self._writing:,} is written")
        return True

    def _fail(self, error: OSError | None) -> None:
        """Tells of a failure once, not at each attempt while a disk is full for hours."""
        if not self._failed:
            why = f": {why_not_written(error, self.directory)}" if error else ""
            self.tell(f"a snapshot could not be written{why}; the run goes on without it")
        self._failed = True

    @property
    def exist(self) -> bool:
        """Whether there are snapshots, of any run."""
        return bool(self._files())

    def latest(self, check: Callable[[State], object], resumes: bool = False) -> tuple[Path, State] | None:
        """Returns the newest snapshot of this run that can be read and that ``check`` accepts; None without one.

        A newer one that is proved to be broken is set aside with a warning: it would be taken for newer than those to
        come.

        Args:
            resumes: whether this run is to go on from the snapshots of another, which then stay as they are until
                worker 0 comes.

        Raises:
            RefusedError: there are broken snapshots, and none of this run that can be read; or one cannot be read now.
        """
        for part in self.directory.glob("*.part"):
            part.unlink(missing_ok=True)  # its writer has ended with its server
        for path in self._newest_first():
            state = self._read(path, check)
            if state is None:
                continue
            if state.pop("run", self.run) != self.run:
                if resumes:
                    return None
                self.tell(f"{path} is skipped: it is of another run")
                path.replace(path.with_suffix(OTHER))
            else:
                return path, state
        if self.broken:
            raise RefusedError(f"no snapshot in {self.directory} can be read")
        return None

    @property
    def broken(self) -> list[Path]:
        """The snapshots that are set aside since they are broken; there is no newer one that is not."""
        return sorted(self.directory.glob(f"*{_TORN}"))

    def of_run_before(self, check: Callable[[State], object]) -> tuple[Path, State] | None:
        """Returns the newest snapshot, of any run, that can be read and that ``check`` accepts; None without one.

        Raises:
            RefusedError: one cannot be read now.
        """
        for path in self._newest_first():
            state = self._read(path, check)
            if state is not None:
                state.pop("run", None)
                return path, state
        return None

    def _read(self, path: Path, check: Callable[[State], object]) -> State | None:
        """Returns the state in a snapshot; None, with a warning, where it is proved to be broken, or ``check`` raises:
        it is then set aside.

        Raises:
            RefusedError: it cannot be read now, after several attempts.
        """
        for pause in (*_PAUSES, None):
            try:
                state = load_checked(path)
                check(state)
                return state
            except Exception as error:  # of any kind from ``check``
                if not is_scarcity(error):
                    why = str(error) if isinstance(error, BrokenFileError) else f"{type(error).__name__}: {error}"
                    self.tell(f"{path} is skipped: {why}")
                    path.replace(path.with_suffix(_TORN))
                    return None
                if pause is None:
                    raise RefusedError(f"{path} cannot be read now: {first_line(error)}; it stays as it is") from error
            time.sleep(pause)
        raise AssertionError

    def take_last(self, state: State, version: int) -> None:
        """Writes a snapshot as :meth:`take_here`, at the end of this process; says so where that fails."""
        try:
            self.take_here(state, version)
        except (OSError, RuntimeError) as error:
            self.tell(f"the last snapshot could not be written: {why_not_written(error, self.directory)}")

    def take_here(self, state: State, version: int) -> None:
        """Writes a snapshot in this process, which serves nobody meanwhile.

        Raises:
            OSError, RuntimeError: it cannot be written; torch makes one of the other when the disk is full.
        """
        self.wait()
        self.directory.mkdir(exist_ok=True)
        self._write(state, version)

    def begin_anew(self) -> None:
        """Removes the snapshots of earlier runs, but for the newest, which becomes a ``.before``.

        Whoever forgot ``--resume`` can rename it and go on. Of the runs before that one, only the highest version
        stays: otherwise a job that is interrupted and begins anew each night would fill the disk.
        """
        for path in self._files()[-1:] or self.broken[-1:]:
            for older in sorted(self.directory.glob(f"*{_BEFORE}"))[:-1]:
                older.unlink(missing_ok=True)
            self._before = path.replace(path.with_suffix(_BEFORE))
            self.tell(f"this run begins anew; {self._before} is kept of the run that was interrupted in this directory")
        self.clear()

    def give_back(self) -> None:
        """Gives the snapshot that :meth:`begin_anew` has kept its name again, after a run that has trained nothing:
        whoever forgot ``--resume`` gives it next."""
        if self._before is not None:
            self._before.replace(self._before.with_suffix(".pt"))

    def clear(self) -> None:
        """Removes all snapshots, such as those of an earlier run, but for broken ones that are newer than these."""
        files = self._files()
        self._remove_broken(files[-1].stem if files else "")
        for path in [*files, *self.directory.glob("*.part")]:
            path.unlink(missing_ok=True)
        for path in self.broken:
            path.replace(path.with_suffix(_BEFORE))

    def _remove_broken(self, before: str) -> None:
        """Removes the broken snapshots that are older than the one of this name."""
        for path in self.broken:
            if path.stem <= before:
                path.unlink(missing_ok=True)

    def _write(self, state: State, version: int) -> None:
        path = self.directory / f"version-{version:012d}.pt"
        part = path.with_suffix(".part")
        try:
            with open(part, "wb", opener=private) as file:
                save_checked(state | {"run": self.run}, file)
                file.flush()
                os.fsync(file.fileno())
            torch.load(part, map_location="cpu", weights_only=True, mmap=True)  # an unreadable file replaces nothing
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        _sync(self.directory)
        self._remove_broken(path.stem)
        for old in self._files()[:-_KEPT]:
            old.unlink(missing_ok=True)

    def _newest_first(self) -> Iterator[Path]:
        for path in sorted(self.directory.glob("version-*.pt"), reverse=True):
            if path.is_file():
                yield path
            else:
                self.tell(f"{path} is skipped: it is no file")

    def _files(self) -> list[Path]:
        return snapshots_in(self.directory.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
