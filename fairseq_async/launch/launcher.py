"""Runs the server and the workers of one run on this machine, from their start to their end."""

import shutil
import time
from pathlib import Path

from fairseq_async.environment import RENDEZVOUS, SLOWDOWN, TLS, TOKEN, WORKER, WORKERS
from fairseq_async.errors import LOST_SERVER, USER_ERROR, ConfigurationError
from fairseq_async.exchange.authentication import new_token, read_token
from fairseq_async.exchange.tls import worker_context
from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.command.script import ScriptCommand
from fairseq_async.launch.error_lines import same_mistake, traceback
from fairseq_async.launch.interrupted import has_snapshot, what_is_kept
from fairseq_async.launch.options import LaunchOptions
from fairseq_async.launch.processes import Processes, RunFailedError, Worker, failure, interrupt_on_signals
from fairseq_async.launch.progress.display import Display
from fairseq_async.launch.progress.progress import Progress
from fairseq_async.options.addresses import ANY, LOOPBACK
from fairseq_async.protocol.notices import ENDED, SAVED
from fairseq_async.records.created_files import CreatedFiles
from fairseq_async.worker.start.invitation import invitation
from fairseq_async.worker.start.rendezvous import Rendezvous, ServerRequest
from fairseq_async.worker.start.server_process import ServerProcess, manner

_FINISHING = 60.0  # seconds for worker 0 to end after it has left a finished run; it has written its checkpoint before
_LEAVING = 5.0  # seconds for the other workers to end; one that does not end by then hangs


class Launcher:
    """Starts a server and, for each worker, the same command, restarts workers that die, and ends everything.

    For a script, the server is started when the script's worker 0 has asked for it.

    Raises:
        ConfigurationError: the token or the certificates cannot be read.
    """

    def __init__(self, command: WorkerCommand | ScriptCommand, options: LaunchOptions) -> None:
        if options.tls is not None:
            worker_context(options.tls)
        self.command, self.options = command, options
        self.tls = None if options.tls is None else options.tls.resolve()
        self.token = read_token(options.token_file) if options.token_file else new_token()
        self.processes = Processes(command, options.workers, options.ranks)
        self.run_dir = command.run_dir
        self.server: ServerProcess | None = None
        self._created = CreatedFiles(self.run_dir)
        self._ending: tuple[bool, float] | None = None  # whether worker 0 runs after the end, and since when
        self._says_it_waits = False
        self._absent: dict[int, float] = {}  # workers that have ended in order without an update, and since when

    def run(self) -> None:
        """Runs until the run is finished.

        Raises:
            AsyncError: the run failed; every process has been ended.
            KeyboardInterrupt: the run was interrupted; every process has been ended, and the server has written its
                last snapshot.
        """
        interrupt_on_signals()
        self.display = Display(Progress(self.run_dir, len(self.processes.workers)))
        try:
            with self.display:
                if self.command.server:
                    standby = not self.command.no_standby
                    wanted = ServerRequest(self.command.server, str(self.run_dir), self.command.tls, standby=standby)
                    self._start_server(wanted)
                for worker in self.processes.workers:
                    self._start(worker)
                self._watch()
            self.display.say(f"finished: {self.display.progress.result()}")
        except KeyboardInterrupt:
            self.display.say("interrupted: the server writes what was done")
            self._end()
            self.display.say(what_is_kept(self.display.progress, self.run_dir, self._created, self.command))
            raise
        finally:
            self._end()

    def _end(self) -> None:
        self.processes.end()
        if self.server is not None:
            self.server.end(why=SAVED if self.processes.saved else ENDED)
            self.processes.move_logs(self.run_dir, shutil.move)  # the logs that were on another disk

    def _start_server(self, wanted: ServerRequest) -> None:
        self.run_dir = Path(wanted.run_dir)
        if wanted.tls is not None:  # the workers' own command or script names it, so all workers have it
            self.tls = Path(wanted.tls).resolve()
        self._created = CreatedFiles(self.run_dir)
        if self.command.rendezvous is not None and self.command.resumes and not has_snapshot(self.run_dir):
            self.display.say(f"--resume: no run was interrupted in {self.run_dir}; this one begins at its beginning")
        try:
            self.server = self._new_server(wanted)
        except ConfigurationError:
            self._created.remove_directories()
            raise
        token_file = self.options.token_file or self.server.token_file
        self.display.say(invitation(self.server.address, token_file.resolve(), self.command.given, self.tls))

    def _new_server(self, wanted: ServerRequest) -> ServerProcess:
        given = f"address {self.options.host}:{self.options.port} (--host)"
        if self.options.host == LOOPBACK:
            given = f"port {self.options.port} (--port)"
        return ServerProcess(
            wanted.module,
            len(self.processes.workers),
            self.run_dir,
            self.run_dir / "logs" / "server.log",
            self.options.port,
            self.options.host,
            self.token,
            restarts=self.options.max_restarts,
            resumes=self.command.resumes,
            tls=self.tls,
            run_dir_option=wanted.run_dir_option,
            given=given,
            stays=True,
            standby=wanted.standby,
        )

    def _start_server_of_script(self, rendezvous: Rendezvous) -> None:
        """Starts a script's server, once worker 0 has told its module and the run's directory."""
        wanted = rendezvous.requested()
        if self.server is not None or wanted is None:
            return
        self._start_server(wanted)
        assert self.server is not None
        self.processes.move_logs(self.run_dir)
        self.display.progress = Progress(self.run_dir, len(self.processes.workers))
        rendezvous.answer(self._address)

    @property
    def _address(self) -> str | None:
        """The server's address for workers on this machine: the loopback address, and so shared memory, if the server
        listens on it too; None without a server."""
        return self.server.address.replace(f"{ANY}:", f"{LOOPBACK}:") if self.server else None

    def _start(self, worker: Worker) -> None:
        worker.updates_at_start = self.display.progress.updates[worker.id]
        variables = {
            TOKEN: self.token,
            WORKER: str(worker.id),
            WORKERS: str(len(self.processes.workers)),
            SLOWDOWN: str(self.options.slowdown[worker.id] if self.options.slowdown else 1.0),
        }
        if self.tls is not None:
            variables[TLS] = str(self.tls)
        if self.command.rendezvous is not None:
            variables[RENDEZVOUS] = str(self.command.rendezvous.directory)
        self.processes.start(worker, self._address, variables)

    def _watch(self) -> None:
        while self.processes.running or self.processes.failed:
            time.sleep(0.2)
            if self.command.rendezvous is not None:
                self._start_server_of_script(self.command.rendezvous)
            self.display.refresh()
            if self.server is not None and (code := self.server.poll()) is not None:
                raise RunFailedError(f"the server {manner(code)}; log: {self.run_dir / 'logs' / 'server.log'}")
            for worker in self.processes.failed:
                self._after_death(worker)
            if self.server is not None:
                if not self.server.finished.is_set():
                    self._check_absent()
                if self.server.over.is_set():
                    self._after_end()
        self.display.refresh()
        if not self.display.progress.begun:
            self._check_whether_finished()

    def _check_whether_finished(self) -> None:
        """Decides, after workers that ended without an update, whether the run was finished already or nothing was
        trained."""
        if self.server is None:
            raise RunFailedError(
                f"{self.command.name}: the script ended without joining a run; use initialize or attach of "
                "fairseq_async.deepspeed_plugin, or fairseq_async.torch, in it, as the README shows"
            )
        if not self.server.finished.wait(_LEAVING):
            log = self.run_dir / "logs" / "worker-0.log"
            raise RunFailedError(f"the workers ended without having trained anything; log: {log}")

    def _check_absent(self) -> None:
        """Ends a run in which a worker has ended in order, as by ``sys.exit()``, before it has had a part in it: the
        others would wait for it, and then have a model without its data."""
        progress, now = self.display.progress, time.monotonic()
        for worker in self.processes.workers:
            if worker.process.poll() != 0 or progress.updates[worker.id] or progress.unread:
                continue
            if now - self._absent.setdefault(worker.id, now) > _LEAVING:
                error = f"worker {worker.id} ended without having trained anything, and the run is not finished"
                raise failure(error, 1, worker.log, progress.begun, self._end, self._created)

    def _after_death(self, worker: Worker) -> None:
        code = worker.process.returncode
        self.display.progress.poll()
        self.processes.kill_children(worker)  # before its last words: they may hold its output open
        said = self.processes.last_words(worker) if code > 0 else ""
        finished = self.server is not None and self.server.finished.is_set()  # there are no updates any more
        may_be_left_out = finished and code != USER_ERROR  # a worker with a mistake may not have trained at all
        if may_be_left_out and self.processes.saved:
            return self._give_up(worker)
        progress = self.display.progress
        unseen = not progress.unread and progress.updates[worker.id] == worker.updates_at_start
        hopeless = code > 0 and unseen and not finished
        mistaken = code == USER_ERROR or hopeless or same_mistake(worker.last_words, said)
        if (mistaken and code != LOST_SERVER) or worker.restarts >= self.options.max_restarts:
            if may_be_left_out and worker.id > 0:
                return self._give_up(worker)
            raise self._failure(worker)
        worker.restarts, worker.last_words = worker.restarts + 1, said
        how = f"{manner(code)}: {said}" if said else manner(code)
        self.display.say(f"worker {worker.id} {how}; start {worker.restarts} of {self.options.max_restarts} again")
        if finished and self.server is not None:
            self.server.over.clear()  # until the worker has come, and left again
            self._ending = None
        self._start(worker)

    def _give_up(self, worker: Worker) -> None:
        """Leaves a worker out that has died after the end: it has nothing that the run needs."""
        worker.given_up = True
        self.display.say(f"{self.processes.describe_end(worker)}; the run is finished without it")

    def _failure(self, worker: Worker) -> RunFailedError:
        """Returns the error of a run that this worker's end has ended."""
        error, code = self.processes.describe_end(worker), worker.process.returncode
        if self.server is None:
            for line in traceback(worker.log):  # the log is removed with the script's first directory
                self.display.say(line)
            return RunFailedError(error, code)
        return failure(error, code, worker.log, self.display.progress.begun, self._end, self._created)

    def _after_end(self) -> None:
        """Waits for the workers' processes when all have left a finished run, and kills those that hang.

        Worker 0 of a script may go on as long as it likes, to evaluate the model for example. The others have a moment
        after its end.
        """
        first, now = self.processes.workers[0], time.monotonic()
        runs = first.process.poll() is None
        if self._ending is None or self._ending[0] != runs:
            self._ending = runs, now
        seconds = now - self._ending[1]
        if runs and seconds > _FINISHING:
            if self.command.rendezvous is None:
                raise RunFailedError(f"{self.processes.describe_end(first)} (log: {first.log})")
            if not self._says_it_waits:
                self._says_it_waits = True
                self.display.say("the run is finished; waiting for the script of worker 0 (Ctrl-C ends it)")
        elif not runs and seconds > _LEAVING:
            for worker in self.processes.workers:
                if worker.process.poll() is None:
                    self.display.say(f"worker {worker.id} did not end with the run, and is killed")
                    worker.given_up = True
                    self.processes.kill_children(worker)
