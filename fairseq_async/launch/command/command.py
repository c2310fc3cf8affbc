"""The worker's command line: reads from it what the launcher needs, and adds the launcher's own flags."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command.inputs import check_inputs
from fairseq_async.launch.command.programs import find_program
from fairseq_async.method.global_server import SERVER, local_sgd_server
from fairseq_async.method.methods import SYNCHRONOUS
from fairseq_async.method.option_flags import OneLineParser, check_command

# the module of the server for each --optimizer
SERVERS = {
    "hybrid_async": "fairseq_async.launch.fairseq_server",
    "local_sgd": SERVER,
}
# flags that choose where a run begins; --finetune-from-model, only where the directory has nothing to go on from
_BEGINS_FROM = "--restore-file"
_BEGINS_ANEW = (_BEGINS_FROM, *(f"--reset-{what}" for what in ("optimizer", "dataloader", "lr-scheduler")))


def user_dir() -> str:
    """Returns the directory to give to ``fairseq-train --user-dir``: this package."""
    return str(Path(__file__).parents[2])


def without_beginning(words: Sequence[str]) -> list[str]:
    """Returns a command without the flags that choose where a run begins: it goes on where the run was interrupted."""
    with_the_word_before = pairwise(["", *words])
    return [
        word
        for before, word in with_the_word_before
        if word.partition("=")[0] not in _BEGINS_ANEW and before != _BEGINS_FROM
    ]


class WorkerCommand:
    """One ``fairseq-train`` command, the same for every worker.

    Args:
        workers: number of workers that will run it; None where that is not known.
        starts_server: worker 0 starts the server, so that ``--server`` may give its address.
        ranks: number of ranks of each worker.

    Attributes:
        synchronous: whether the workers are the ranks of one data-parallel group, without a server.
        server: the server's module; empty for a synchronous method.
        name: name of the program, for errors.
        given: the whole command, as it was given.
        run_dir: the run's directory.
        tls: directory of the certificates; None where the command names none.
        on_cpu: whether GPUs are not to be used.
        resumes: whether to go on with an interrupted run in the same directory.

    Raises:
        ConfigurationError: there is no such program, the optimizer is not one of ours, a flag is one that the launcher
            gives itself, or options of the method cannot work.
    """

    rendezvous = None  # not needed: the command says which server to start

    def __init__(
        self, arguments: list[str], workers: int | None = None, starts_server: bool = False, ranks: Sequence[int] = (1,)
    ) -> None:
        self.name = arguments[0]
        self.program, self.given = find_program(arguments[0]), arguments
        self.arguments = arguments[1:]
        given = _parser().parse_known_args(self.arguments)[0]
        if given.optimizer not in (*SERVERS, *SYNCHRONOUS):
            raise ConfigurationError(
                f"--optimizer {given.optimizer or '(missing)'}: launch runs --optimizer "
                f"{' or '.join((*SERVERS, *SYNCHRONOUS))}; name yours with --inner-optimizer"
            )
        if not given.save_dir:
            raise ConfigurationError("--save-dir is empty: give a directory, or leave the flag out")
        if given.server and not starts_server:
            raise ConfigurationError("--server: launch starts its own server; leave the flag out")
        check_command(given.optimizer, self.arguments, workers)
        self.synchronous = given.optimizer in SYNCHRONOUS
        self.server = SERVERS.get(given.optimizer, "")
        if self.server == SERVER:
            self.server = local_sgd_server(given.upstream)
        self.run_dir = Path(given.run_dir or given.save_dir)
        self.tls: str | None = given.tls
        self.no_standby: bool = given.no_standby
        self.on_cpu = given.cpu
        self.resumes = not any(flag.partition("=")[0] in _BEGINS_ANEW for flag in self.arguments)
        self._optimizer = given.optimizer
        self._has_user_dir, self._arch = given.user_dir is not None, given.arch
        world = given.distributed_world_size
        if not self.synchronous and world is not None and {world} != set(map(str, ranks)):
            raise ConfigurationError(
                f"--distributed-world-size is {world}, and --ranks-per-worker {','.join(map(str, ranks))}: leave the "
                f"former out, and give --ranks-per-worker {world} if a worker is to have as many ranks"
            )
        self._finds_world_size = world is not None or max(ranks) > 1

    def check_inputs(self) -> None:
        """Checks the command's optimizer, data and model.

        Raises:
            ConfigurationError: fairseq would not find one of them.
        """
        check_inputs(self._optimizer, self.arguments)
        if self._arch is None and not self._has_user_dir:  # fairseq's own error has no words
            raise ConfigurationError("--arch is missing: give the name of a model, as --arch transformer")

    def line(self, address: str | None) -> list[str]:
        """Returns the whole command of a worker of the server at ``address``; None for a rank of a synchronous method,
        or for a worker that finds the address by itself."""
        added = [] if self._has_user_dir else ["--user-dir", user_dir()]
        if self.synchronous:
            return [self.program, *self.arguments, *added]
        if not self._finds_world_size:
            added += ["--distributed-world-size", "1"]
        return [self.program, *self.arguments, *added, *(["--server", address] if address else [])]


def _parser() -> OneLineParser:
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    for flag in ("--optimizer", "--server", "--upstream", "--run-dir", "--tls", "--user-dir"):
        parser.add_argument(flag)
    parser.add_argument("--distributed-world-size")
    parser.add_argument("-a", "--arch", "--arc", "--ar")  # fairseq takes what begins as an option does
    parser.add_argument("--save-dir", default="checkpoints")  # fairseq's default
    for switch in ("--cpu", "--no-standby"):
        parser.add_argument(switch, action="store_true")
    return parser
