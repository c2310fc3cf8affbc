"""Commands that begin a run, or become a part of one."""

from pathlib import Path
from typing import Annotated

import typer

from fairseq_async.errors import ConfigurationError
from fairseq_async.options.addresses import LOOPBACK

_MAX_RESTARTS = 3
_Command = Annotated[
    list[str],
    typer.Argument(
        metavar="-- COMMAND", help="fairseq-train or python SCRIPT, with its arguments.", show_default=False
    ),
]
_Ranks = Annotated[
    str,
    typer.Option(
        metavar="N",
        help="Ranks of a worker, which train synchronously among themselves; 2,1 for workers of unequal size.",
    ),
]
_Encrypt = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Encrypt every connection, with the certificates in DIR.")
]
_Certificates = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory of the run's certificates, if the run has --tls.")
]
_Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with a script's run that was interrupted; fairseq-train does so without it."),
]
app = typer.Typer()


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    worker_command: _Command,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Number of workers on this machine.")],
    ranks_per_worker: _Ranks = "1",
    slowdown: Annotated[
        str,
        typer.Option(
            metavar="A,B,…", help="Make workers slower, for experiments: 1,4 makes worker 1 four times slower."
        ),
    ] = "",
    max_restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="How often each worker that dies is started again, and the server.",
            show_default=str(_MAX_RESTARTS),
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port of the server; 0 takes a free one.")
    ] = 0,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address on which the server listens; 0.0.0.0 lets workers of other machines join, and needs "
            "--token-file.",
            show_default="127.0.0.1",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File with the run's secret, for workers of other machines; only you may read it."
        ),
    ] = None,
    tls: _Encrypt = None,
    resume: _Resume = False,
) -> None:
    """Train one job with several workers on this machine: fairseq-train, or a script that calls fairseq_async."""
    from fairseq_async.launch.command.programs import is_fairseq, numbers_of_ranks  # start-up time
    from fairseq_async.launch.options import LaunchOptions
    from fairseq_async.launch.start import launch_fairseq, launch_script

    restarts = _MAX_RESTARTS if max_restarts is None else max_restarts
    asynchronous = {"--slowdown": slowdown, "--max-restarts": max_restarts, "--host": host, "--token-file": token_file}
    asynchronous |= {"--ranks-per-worker": None if ranks_per_worker == "1" else ranks_per_worker}
    given = [flag for flag, value in (asynchronous | {"--tls": tls}).items() if value not in (None, "")]
    options = LaunchOptions(
        workers=workers,
        ranks=numbers_of_ranks(ranks_per_worker, workers),
        slowdown=_factors(slowdown),
        max_restarts=restarts,
        port=port,
        host=host or LOOPBACK,
        token_file=token_file,
        tls=tls,
        resume=resume,
        asynchronous=given,
    )
    (launch_fairseq if is_fairseq(worker_command) else launch_script)(worker_command, options)


@app.command()
def join(
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="Address of the server, as its launcher has printed it.", show_default=False
        ),
    ],
    worker_command: _Command,
    token_file: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="File with the run's secret: on the server's machine, .token in the run's directory."
        ),
    ],
    ranks_per_worker: Annotated[
        int, typer.Option(metavar="N", min=1, help="Ranks of this worker, which train synchronously among themselves.")
    ] = 1,
    tls: _Certificates = None,
) -> None:
    """Become one more worker of a run that is going on, with the same command as its other workers."""
    from fairseq_async.launch.join import join as begin  # start-up time

    _check_token(token_file)
    begin(address, worker_command, token_file, tls, ranks_per_worker)


@app.command()
def serve(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Address on which this server listens.", show_default=False)
    ],
    regions: Annotated[int, typer.Option(metavar="N", min=1, help="Number of regions.")],
    run_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for events.jsonl, run.json, logs and snapshots.")
    ],
    token_file: Annotated[
        Path,
        typer.Option(metavar="FILE", help="File with the run's secret, the same in all regions; only you may read it."),
    ],
    tls: _Encrypt = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last snapshot in --run-dir.")] = False,
    no_standby: Annotated[
        bool, typer.Option("--no-standby", help="Start no second process that waits to become the server.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(metavar="N", min=0, help="How often the server is started again when it dies.")
    ] = _MAX_RESTARTS,
) -> None:
    """Be the global server of several regions, whose own servers are its workers (HALoS): each has --upstream."""
    _check_token(token_file)
    from fairseq_async.launch.serve import serve as begin  # start-up time

    begin(address, regions, run_dir, token_file, tls, resume, not no_standby, max_restarts)


@app.command()
def shard(
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT",
            help="Address at which the server and the workers reach this machine.",
            show_default=False,
        ),
    ],
    token_file: Annotated[
        Path,
        typer.Option(metavar="FILE", help="File with the run's secret, the server's; only you may read it."),
    ],
    tls: _Certificates = None,
) -> None:
    """Hold a shard of a run's server on this machine; the run has this address in --server-shards."""
    _check_token(token_file)
    from fairseq_async.launch.shard import hold  # start-up time

    hold(address, token_file, tls)


@app.command(context_settings={"allow_interspersed_args": False})
def worker(
    worker_command: _Command,
    ranks_per_worker: _Ranks = "1",
) -> None:
    """Become one worker of a run whose workers srun, torchrun or mpirun starts, on one machine or several."""
    from fairseq_async.launch.task import become_worker  # start-up time

    become_worker(worker_command, ranks_per_worker)


@app.command("ray", context_settings={"allow_interspersed_args": False})
def ray_(
    worker_command: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND | scale +N",
            help="fairseq-train or python SCRIPT, with its arguments; or scale, and the number of workers to add (+2) "
            "or to remove (-1).",
            show_default=False,
        ),
    ],
    workers: Annotated[
        str,
        typer.Option(
            metavar="GROUPS",
            help="Workers and what each one gets: 4*GPU,2*CPU:4 is four with a GPU each, and two with four cores each.",
        ),
    ] = "",
    shards: Annotated[
        int,
        typer.Option(metavar="S", min=1, max=64, help="Shards of fairseq-train's server, each on a node of its own."),
    ] = 1,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the Ray cluster; auto is that of this machine.")
    ] = "auto",
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the run, if a cluster has several.")] = "training",
    max_restarts: Annotated[
        int, typer.Option(metavar="N", min=0, help="How often each process and each actor that dies is started again.")
    ] = _MAX_RESTARTS,
    resume: _Resume = False,
) -> None:
    """Train one job on a Ray cluster; or, with scale +2 or scale -1, change how many workers it has meanwhile."""
    from fairseq_async.launch.ray.resources import check_shards, parse_change, parse_workers  # start-up time

    scales = worker_command[0] == "scale" and not workers
    change = parse_change(worker_command[1:]) if scales else 0
    wanted = [] if scales else parse_workers(workers)
    if not scales:
        check_shards(worker_command, shards)
    try:
        from fairseq_async.launch.ray.run import RayOptions, scale, train
    except ModuleNotFoundError as error:  # ray is an extra
        raise ConfigurationError(f'this needs Ray ({error}): pip install ".[ray]"') from error

    if scales:
        scale(change, address, name)
    else:
        train(worker_command, wanted, RayOptions(address, name, max_restarts, resume, shards))


@app.command()
def certificates(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory to write; give it to --tls.", show_default=False)
    ],
    hosts: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST", help="All names and addresses at which workers reach the server.", show_default=False
        ),
    ],
) -> None:
    """Make the certificates of a run for --tls: a small authority, the server's certificate and the workers'."""
    try:
        from fairseq_async.launch.certificates import make  # start-up time
    except ModuleNotFoundError as error:  # cryptography is an extra
        raise ConfigurationError(f'certificates need cryptography ({error}): pip install ".[tls]"') from error

    for line in make(directory, hosts):
        print(line)


@app.command("user-dir")
def print_user_dir() -> None:
    """Print the directory for fairseq's --user-dir."""
    from fairseq_async.launch.command.command import user_dir  # start-up time

    print(user_dir())


def _check_token(file: Path) -> None:
    try:
        file.open().close()
    except OSError as error:
        raise ConfigurationError(f"--token-file {file}: cannot be read: {error.strerror}") from error


def _factors(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise ConfigurationError(f"--slowdown {text}: give numbers separated by commas, as in 1,4") from error
