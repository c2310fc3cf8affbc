"""The server as a process, which a launcher or worker 0 starts, restarts when it dies, and follows to its end."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from fairseq_async.environment import TOKEN
from fairseq_async.errors import ConfigurationError, option, spelled
from fairseq_async.exchange.authentication import new_token, write_token
from fairseq_async.exchange.linux import environment
from fairseq_async.exchange.tls import server_context
from fairseq_async.options.addresses import LOOPBACK, is_loopback
from fairseq_async.protocol.notices import ENDED, EXIT_CODE, RUN_FINISHED, RUN_OVER
from fairseq_async.protocol.standby import Adopted, Standby
from fairseq_async.records.created_files import CreatedFiles
from fairseq_async.worker.start.run_directory import ENDING_SECONDS, claim, make_directories

_BACKLOG = 128  # connections that may wait until the server has imported its modules
_QUIET_SECONDS = 2.0  # that a worker that has left waits for the others before it prints that it waits
_FAILURES = 5  # in a row, after which it is not started again: each costs a restart, and a pause
_STANDBY_SECONDS = 1.0  # between two looks whether the standby is there; twice as long after each that was not
_LEAVING_SECONDS = 20.0  # that a server may take to end on a busy machine
_PRINTING_SECONDS = 1.0  # that its last lines may take: a process that it has left may have its pipe open


def _listen(host: str, port: int, given: str = "") -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        where = given or f"{option('server')} {host}:{port}"
        why = str(error).partition(" (while attempting")[0]  # which repeats the address
        raise ConfigurationError(f"{where} cannot be used: {why}; give another") from error


class ServerProcess:
    """A server process that this process starts, and starts again from its last snapshot if it dies.

    The server does not outlive this process. The socket listens before the server has imported anything, and while a
    server that has died is started again: a worker that connects meanwhile waits. Beside the server waits a standby, a
    second process that has imported everything. It becomes the server when that dies, and another standby is started.

    Args:
        module: the module whose ``__main__`` calls ``serve`` of ``server/programs/program.py`` with its ``build``.
        workers: number of workers that are announced.
        run_dir: the run's directory; made if it is not there, and locked against other runs.
        log: the file for the server's output.
        port: the port to listen on; 0 takes a free one.
        host: the address to listen on, for workers on other machines.
        token: the secret that workers must know; a new one by default.
        restarts: how often the server is started again at most.
        ends_with_workers: end also an unfinished run when all its workers have left, as nobody will restart one.
        resumes: the server goes on from a snapshot of a run that was interrupted in the same directory, if worker 0
            brings no newer state.
        tls: directory of the certificates with which connections are encrypted.
        recovers: the server goes on from the newest snapshot as after its own death, with the workers that are there.
        given: host and port as the user has written them, for an error about them; by default with the option
            ``server``.
        stays: the server stays when its run is over, until :meth:`end`: a worker 0 that is started again before it has
            saved the model gets the last parameters.
        run_dir_option: name of the option that sets the run's directory, for errors; by default as this process spells
            options.
        standby: keep a standby, where the server may be started again.

    Attributes:
        finished: set when the run is finished, and its last state is on disk if there is room.
        over: set when, besides, all workers have left, or are given up.
        token_file: where other processes of the same user on this machine find the token.

    Raises:
        ConfigurationError: the port or the directory cannot be used or is taken, or the certificates cannot be used.
    """

    def __init__(
        self,
        module: str,
        workers: int,
        run_dir: Path,
        log: Path,
        port: int = 0,
        host: str = LOOPBACK,
        token: str | None = None,
        restarts: int = 0,
        ends_with_workers: bool = False,
        resumes: bool = False,
        tls: Path | None = None,
        recovers: bool = False,
        given: str = "",
        run_dir_option: str = "",
        stays: bool = False,
        standby: bool = True,
    ) -> None:
        if tls is not None:
            server_context(tls)
        self._created = CreatedFiles(run_dir)
        named = run_dir_option or option("run_dir")
        make_directories(run_dir, log.parent, named)
        self.token, self.log, self.restarts = token or new_token(), log, restarts
        self.token_file = run_dir / ".token"
        self._command = [*python_module(module), "--workers", str(workers), "--run-dir", str(run_dir)]
        self._command += ["--ends-with-workers"] * ends_with_workers + ["--stays"] * stays
        self._command += ["--resume"] * resumes + ([] if tls is None else ["--tls", str(tls.resolve())])
        self._environment = os.environ | {TOKEN: self.token, "CUDA_VISIBLE_DEVICES": "", **_threads(workers)}
        self._workers, self._has_standby, self._standby = workers, standby, cast("Standby | None", None)
        self._code: int | None = None
        self.finished, self.over = threading.Event(), threading.Event()
        self._stopping = threading.Event()
        self._starting = threading.RLock()  # a signal may end this server while it is being ended
        self._claimed = -1
        try:
            self._claimed = claim(run_dir, named)  # first: a server that ends here may still have the port
            self._listener = _listen(host, port, given)
            self.address = f"{host}:{self._listener.getsockname()[1]}"
            self._start_first(recovers)
        except BaseException as error:
            self._let_go()
            if isinstance(error, ConfigurationError):
                self._created.remove_directories()
            raise
        write_token(self.token_file, self.token)
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()
        if tls is None and not is_loopback(host):
            say(exposed(self.address))

    def poll(self) -> int | None:
        """Returns the exit code of a server that has ended and is not started again; else None."""
        return self._code

    def join(self, seconds: float | None = None) -> None:
        """Waits for the server's end, for so many seconds at most; without a limit by default."""
        self._supervisor.join(seconds)

    def outlast_workers(self) -> None:
        """Waits in the process of a worker that has left until all others have left."""
        # a lone worker waits only for the server
        if not self.over.wait(_QUIET_SECONDS if self._workers > 1 else _LEAVING_SECONDS):
            say("worker 0 has ended; its server stays for the other workers (Ctrl-C ends it)")
            self.over.wait()

    def end(self, seconds: float = ENDING_SECONDS, why: str = ENDED) -> None:
        """Lets the server write a last snapshot, if its run has begun, then kills it.

        Args:
            why: ``SAVED`` removes the state of a finished run; ``KEPT`` and ``ENDED`` leave it, the latter with a line.
        """
        with self._starting:
            self._stopping.set()
            self._cut_lifeline(why)
            self._end_standby()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            say(f"the server has not written its last snapshot within {seconds:g} s, and is killed")
        self.stop()
        self._printing.join(_PRINTING_SECONDS)  # its last words may say where the model is

    def _cut_lifeline(self, why: str) -> None:
        """Tells the server, by a byte on its stdin, that the process that started it is gone, or asks it to end."""
        if self.process.stdin is None or self.process.stdin.closed:
            return
        # Closing the pipe is not enough: processes forked from this one, such as a data loader's, have it open too.
        with suppress(BrokenPipeError):  # the server has ended
            self.process.stdin.write(why.encode())
            self.process.stdin.flush()
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def stop(self) -> None:
        """Kills the server."""
        with self._starting:
            self._stopping.set()
            self.process.kill()
            self._end_standby()
        self.process.wait()
        with suppress(OSError):  # a directory that has become read-only keeps it, and it opens nothing any more
            self.token_file.unlink(missing_ok=True)
        self._let_go()

    def discard(self) -> None:
        """Kills a server whose run has not begun, and removes the files that its start has made."""
        self.stop()
        self._created.remove(logs=True)

    def _start_first(self, recovers: bool) -> None:
        if not recovers:
            self._follow(*self._spawn())
            return
        while not self._recover():
            if self.restarts == 0:
                raise ConfigurationError(f"the server {manner(self.process.wait())} as it was started; see {self.log}")
            self.restarts -= 1

    def _spawn(self, *arguments: str, report: Sequence[int] = ()) -> tuple["subprocess.Popen[bytes]", int]:
        """Starts a process of the server's program, with a standby; returns it and the descriptor of its notices."""
        reader, writer = os.pipe()
        standby = Standby() if self._has_standby and self.restarts > 0 else None
        try:
            with self.log.open("a") as output, self._starting:
                if self._stopping.is_set():
                    raise ConfigurationError("the server was stopped")
                listening, theirs = self._listener.fileno(), [] if standby is None else [standby.theirs.fileno()]
                line = [*self._command, "--listener", str(listening), "--notices", str(writer), *arguments]
                process = subprocess.Popen(
                    [*line, *(word for each in theirs for word in ("--standby", str(each)))],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[listening, self._claimed, writer, *report, *theirs],
                    start_new_session=True,
                    env=self._environment | environment(),
                )
                self._end_standby()
                self._standby = standby
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
            if standby is not None:
                standby.theirs.close()
        return process, reader

    def _follow(self, process: "subprocess.Popen[bytes] | Adopted", notices: int) -> None:
        """Takes a process for the server, and starts the thread that prints its notices."""
        self.process = process
        self._printing = threading.Thread(target=self._pass_on, args=(notices, process), daemon=True)
        self._printing.start()

    def _recover(self) -> str:
        """Lets the standby, or else a new process, go on from the newest snapshot; returns the snapshot's name, or
        nothing where that server has died before it could go on.

        Raises:
            ConfigurationError: it cannot go on.
        """
        reader, writer = os.pipe()
        with open(reader) as report:
            try:
                with self._starting:
                    begun = None if self._standby is None else self._standby.begin(writer)
                    self._follow(*(begun or self._spawn("--recover", str(writer), report=[writer])))
            finally:
                os.close(writer)
            said = report.read()
        if self.restarts == 0:
            self._end_standby()
        if said.startswith("error: "):
            self.process.kill()
            self.process.wait()
            raise ConfigurationError(spelled(said).removeprefix("error: "))
        return said

    def _wait(self) -> int:
        """Waits for the server's end, and returns its exit code. Starts another standby where that has died."""
        pause = _STANDBY_SECONDS
        while self._has_standby and self.restarts > 0:
            self._printing.join(pause)  # it ends with the server's process
            if not self._printing.is_alive():
                break
            if self._standby is not None and self._standby.is_gone:
                pause *= 2
                with suppress(OSError, ConfigurationError), self._starting:  # no memory; or it is being stopped
                    process, notices = self._spawn("--waits")
                    os.close(notices)  # it has others when it is the server
                    if self._standby is not None:
                        self._standby.process = process
        self.process.wait()
        self._printing.join(_PRINTING_SECONDS)  # what it says of its exit code
        return self.process.wait()

    def _end_standby(self) -> None:
        with self._starting:
            standby, self._standby = self._standby, None
        if standby is not None:
            standby.end()

    def _supervise(self) -> None:
        """Runs in a thread: starts the server again when it dies, at the same address, for workers that wait for it."""
        failures = 0  # in a row
        while (code := self._wait()) != 0 and not self._stopping.is_set() and self.restarts > 0:
            self.restarts -= 1
            try:
                snapshot, failures = self._recover(), 0
            except (ConfigurationError, OSError) as error:  # no memory for a process, for example
                failures += 1
                if self._stopping.is_set():
                    break
                ends = self.restarts == 0 or failures > _FAILURES
                say(f"the server {manner(code)}, and cannot be started again{'' if ends else ' yet'}: {error}")
                if ends or self._stopping.wait(failures):
                    break
                continue
            after = f"was started again from {snapshot}" if snapshot else "the one that was to go on has died at once"
            say(f"the server {manner(code)}, and {after}")
        self._end_standby()
        self._code = code
        self._listener.close()
        self.over.set()  # nobody is to wait for more

    def _pass_on(self, notices: int, process: "subprocess.Popen[bytes] | Adopted") -> None:
        """Runs in a thread: prints the server's notices until the server has ended, and notes what they announce."""
        with open(notices, errors="replace") as lines:
            for line in map(spelled, map(str.rstrip, lines)):
                if line.startswith(EXIT_CODE):
                    if isinstance(process, Adopted):
                        process.said = int(line.removeprefix(EXIT_CODE))
                    continue
                if line not in (RUN_FINISHED, RUN_OVER):
                    say(line)
                    continue
                self.finished.set()
                if line == RUN_OVER:
                    self.over.set()
                else:
                    self.over.clear()  # a worker has come back

    def _let_go(self) -> None:
        """Frees the directory, and closes the socket: workers that connect are refused."""
        if hasattr(self, "_listener"):
            self._listener.close()
        if self._claimed >= 0:
            os.close(self._claimed)
            self._claimed = -1


def python_module(module: str) -> list[str]:
    """Returns the command that runs a module as a program, which imports nothing from the working directory."""
    return [sys.executable, str(Path(__file__).parents[2] / "server/programs/run_module.py"), module]


def exposed(address: str) -> str:
    """Returns the warning for an address that other machines can reach, without TLS."""
    return (
        f"warning: other machines can reach {address}, and nothing on its way there is encrypted; give {option('tls')} "
        f"DIR, which fairseq-async certificates makes, or let the server listen on {LOOPBACK} behind an SSH tunnel"
    )


def manner(code: int | None) -> str:
    """Returns in words how a process ended, from its exit code."""
    if code is None:
        return "did not end"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def say(what: str) -> None:
    """Prints a line on this process's stderr, the user's terminal. Where that is a file on a full disk, or a pipe that
    is closed, the line is lost: a thread that supervises the server must not end of it."""
    with suppress(OSError):
        print(f"fairseq-async: {what}", file=sys.stderr, flush=True)


def _threads(workers: int) -> dict[str, str]:
    """Returns OpenMP settings by which the server's optimizer uses the cores that the workers leave free."""
    count = max(1, len(os.sched_getaffinity(0)) - workers)
    return {"OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "PASSIVE"}
