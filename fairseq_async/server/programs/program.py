"""The program of a server: from its command line to the end of its run, and the files that it leaves then."""

import argparse
import io
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

from fairseq_async.environment import TOKEN
from fairseq_async.errors import (
    ExchangeError,
    HalfAppliedError,
    RefusedError,
    as_placeholder,
    disk_error,
    is_scarcity,
    spell_options,
)
from fairseq_async.exchange.tls import server_context
from fairseq_async.protocol.notices import ENDED, EXIT_CODE, KEPT, LISTENS, SAVED, Notices, Tell, tell_log
from fairseq_async.protocol.standby import is_orphan, wait_to_begin
from fairseq_async.records.state_files import ending_path, meeting_path
from fairseq_async.server.kept_state import FINAL
from fairseq_async.server.network.event_loop import EventLoop
from fairseq_async.server.plan import Build
from fairseq_async.server.run import Run
from fairseq_async.server.service import Service
from fairseq_async.server.shards.remote import HostConnector

_SIGNALS_TO_ALL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
MakeService = Callable[[argparse.Namespace, Build, Tell], Service]


def usual_service(options: argparse.Namespace, build: Build, tell: Tell) -> Service:
    """Makes the service of a server that is not itself a worker of another server."""
    return Service(os.environ[TOKEN], options.workers, options.run_dir, build, tell=tell)


def serve(build: Build, arguments: Sequence[str] | None = None, make: MakeService = usual_service) -> None:
    """Runs a server until the run is finished, or the process that started the server is gone.

    Args:
        make: makes its service, from the options of the command line.
    """
    options = _parse(arguments)
    # A scheduler or DeepSpeed's launcher stops or warns a job by a signal to every process. This server still writes
    # its last snapshot: it ends when the process that started it is gone.
    for number in _SIGNALS_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        options.starter = os.pidfd_open(os.getppid())
    if options.standby is not None:
        _fork_standby(options)
    with _last_word(options.notices):
        _serve(build, options, make)


def _serve(build: Build, options: argparse.Namespace, make: MakeService) -> None:
    spell_options(as_placeholder)  # a worker or launcher that shows a message knows its front end
    tell = tell_log if options.notices is None else Notices(options.notices)
    service = make(options, build, tell)
    service.resumes = options.resume
    abandoned = partial(_is_abandoned, options.starter)
    service.reach = HostConnector(os.environ[TOKEN], _program(), options.tls, tell, abandoned)
    if options.recover is not None:
        _recover(service, options.recover)
    elif not options.resume:
        service.snapshots.begin_anew()
    listener = socket.socket(fileno=options.listener)
    encryption = None if options.tls is None else server_context(options.tls)
    host, port = listener.getsockname()[:2]
    tell_log(f"{LISTENS} {host}:{port} for {options.workers} workers")
    loop = EventLoop(listener, service, sys.stdin, options.ends_with_workers, encryption, options.stays)
    if options.starter is not None:
        loop.end_with(options.starter)
    if isinstance(tell, Notices):
        loop.announce = tell.signal
    over = loop.run()
    why = _asked() if options.stays or not over else SAVED if service.membership.has_left(0) else ENDED
    if over:
        _finish(service, why)
    else:
        _keep(service, asked=bool(why))


def _fork_standby(options: argparse.Namespace) -> None:
    """Forks a standby, which has all that a server imports and prepares once, and returns in the server. Returns in a
    standby too, when it becomes the server, with that one's descriptors in the options."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first one imports much of torch
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    sys.stdout.flush()
    line, waits = socket.socket(fileno=options.standby), options.waits
    while waits or is_orphan():
        held = [each for each in (options.notices, options.recover) if each is not None]
        lifeline, options.notices, options.recover = wait_to_begin(line, held, not waits, options.starter)
        os.dup2(lifeline, sys.stdin.fileno())
        os.close(lifeline)
        waits = False
    line.close()


@contextmanager
def _last_word(notices: int | None) -> Iterator[None]:
    """Tells the exit code to the process that has started this one, which may not be its parent."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        raise
    finally:
        if notices is not None:
            with suppress(OSError):
                os.write(notices, f"{EXIT_CODE}{code}\n".encode())


def _is_abandoned(starter: int | None) -> bool:
    """Whether the process that started the server is gone, or lets it end, which the event loop finds too."""
    poller = select.poll()
    for each in (sys.stdin.fileno(), starter):
        if each is not None:
            poller.register(each, select.POLLIN)
    return bool(poller.poll(0))


def _asked() -> str:
    """Returns the last word of the process that has started the server; empty if that process was killed."""
    return sys.stdin.read(1) if _is_abandoned(None) else ""


def _program() -> str:
    """Returns the name of the module that is this process's program."""
    spec = sys.modules["__main__"].__spec__
    return "" if spec is None else spec.name


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listener", type=int, required=True, help="descriptor of a socket that listens")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--recover", type=int, help="go on from the last snapshot; descriptor for its name or an error")
    parser.add_argument("--standby", type=int, help="fork a standby; descriptor of the socket at which it is told")
    parser.add_argument("--waits", action="store_true", help="be a standby at first")
    parser.add_argument("--ends-with-workers", action="store_true", help="end when all workers have left")
    parser.add_argument("--stays", action="store_true", help="stay at the end for a worker 0 that has not saved")
    parser.add_argument("--resume", action="store_true", help="go on from a snapshot of a run that was interrupted")
    parser.add_argument("--notices", type=int, help="descriptor of a pipe for lines that the user is to see")
    parser.add_argument("--tls", type=Path, help="directory of certificates")
    parser.set_defaults(starter=None)  # descriptor of the process that has started this one
    return parser.parse_args(arguments)


def _recover(service: Service, descriptor: int) -> None:
    """Goes on from the last snapshot, and writes its name, or the error, for the process that has started this one."""
    with open(descriptor, "w") as report:  # not stdout, where an imported library may write too
        try:
            snapshot = service.recover()
            report.write(snapshot)
            tell_log(f"the server goes on from {snapshot}, after the death of the one before")
        except HalfAppliedError:  # a shard on another machine has died again
            report.write("its last snapshot")
            raise
        except Exception as error:  # such as no room, in memory, on a disk or in /dev/shm
            if not (isinstance(error, RefusedError | ExchangeError | OSError) or is_scarcity(error)):
                raise
            report.write(f"error: {disk_error(error)}")
            raise SystemExit(2) from None


def _finish(service: Service, why: str) -> None:
    """Ends a run that is over. Its snapshots are removed if worker 0 has saved the model. Otherwise, and in a run of
    regions, which save nothing of it, the last state is kept.

    Args:
        why: the last word of the process that started the server; empty if that process was killed.
    """
    service.snapshots.wait()
    run = service.begun  # None where all workers have left before
    if run is not None and run.coordinator.server.version and (run.spec.of_regions or why != SAVED):
        with _or_lost(service):
            service.state.keep_final(run)
        return None if why == KEPT else service.tell(_what_is_kept(service, run))
    with _or_told(service):
        if run is not None:  # else the snapshots are those of a run that was to go on
            service.snapshots.clear()
        meeting_path(service.run_dir).unlink(missing_ok=True)
    if run is not None:
        run.coordinator.server.finish()


def _what_is_kept(service: Service, run: Run) -> str:
    run_dir = service.run_dir
    if not service.state.final:
        return f"the last state could not be written to {run_dir}: only what worker 0 has saved is left of this run"
    kept = f"the last parameters are kept in {run_dir / FINAL}; fairseq-async export {run_dir} OUT writes them for use"
    if run.spec.of_regions:
        return kept
    return f"worker 0 has not ended in order: {kept}; started again (a script with --resume), worker 0 gets them"


def _keep(service: Service, asked: bool) -> None:
    """Writes a last snapshot of an interrupted run; the next run in the directory waits until it is written.

    Args:
        asked: whether the process that started the server has asked it to end. Else that process has died, and another
            one may start the server again, from a snapshot without updates too: workers have these parameters.
    """
    if service.begun is None:
        with _or_told(service):
            service.snapshots.give_back()
        return
    server, ending = service.begun.coordinator.server, ending_path(service.run_dir)
    if asked and not (server.version or server.sequences):
        service.snapshots.wait()
        with _or_told(service):
            service.snapshots.clear()  # the next run would begin with these parameters, whatever its seed
            service.snapshots.give_back()
        tell_log("the server is to end before the first update: nothing is kept")
        return
    with suppress(OSError):  # as on a full disk: the last snapshot may still find room, or says why not
        ending.touch()  # it stays: this process holds the directory until it is gone, and the next run removes the file
    _take_last(service, service.begun)
    tell_log(f"whoever has started the server is gone: it ends at version {server.version:,}")


@contextmanager
def _or_told(service: Service) -> Iterator[None]:
    """Tells where snapshots cannot be removed, as in a directory that has become read-only."""
    try:
        yield
    except OSError as error:
        where = service.snapshots.directory
        service.tell(f"the snapshots of this run cannot be removed: {error}; remove {where} before another run there")


def _take_last(service: Service, run: Run) -> None:
    with _or_lost(service):
        service.snapshots.take_last(run.snapshot(), run.coordinator.server.version)


@contextmanager
def _or_lost(service: Service) -> Iterator[None]:
    """Tells where the last state is lost with a shard that was stopped together with this server."""
    try:
        yield
    except HalfAppliedError as error:
        service.tell(f"the last snapshot could not be written: {error}")
