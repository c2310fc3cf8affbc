"""``fairseq-async``: the command line.

Each command imports what it needs when it is called, and says what is wrong with its arguments before that: torch and
matplotlib take seconds to import.
"""

import logging
import shlex
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fairseq_async.addresses import LOOPBACK
from fairseq_async.errors import AsyncError, ConfigurationError, as_key, spell_options

if TYPE_CHECKING:
    from fairseq_async.replay import Recording, Run

_MAX_RESTARTS = 3
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def description() -> None:
    """Asynchronous training of Transformers."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # a module of fairseq asks for DEBUG otherwise


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    worker_command: Annotated[list[str], typer.Argument(metavar="-- COMMAND ...", show_default=False)],
    workers: Annotated[int, typer.Option(min=1, help="Number of workers on this machine.")],
    slowdown: Annotated[
        str, typer.Option(help="Make workers slower, for experiments: 1,4 makes worker 1 four times slower.")
    ] = "",
    max_restarts: Annotated[
        int | None,
        typer.Option(min=0, help="How often each worker that dies is started again.", show_default=str(_MAX_RESTARTS)),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where the workers meet; 0 takes a free one.")] = 0,
    host: Annotated[
        str | None,
        typer.Option(
            help="The server's address, for workers that join from other machines; 0.0.0.0 is all.",
            show_default="127.0.0.1",
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's secret, which --host needs; only you may read it.")
    ] = None,
    tls: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Encrypt every connection, with the certificates in DIR.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a script's run that was interrupted; fairseq-train does so.")
    ] = False,
) -> None:
    """Train one job with several workers on this machine: fairseq-train, or a script that calls fairseq_async."""
    from fairseq_async.launch.programs import is_fairseq  # start-up time
    from fairseq_async.launch.start import Launch, launch_fairseq, launch_script

    restarts = _MAX_RESTARTS if max_restarts is None else max_restarts
    asynchronous = {"--slowdown": slowdown, "--max-restarts": max_restarts, "--host": host, "--token-file": token_file}
    given = [flag for flag, value in (asynchronous | {"--tls": tls}).items() if value not in (None, "")]
    options = Launch(workers, _factors(slowdown), restarts, port, host or LOOPBACK, token_file, tls, resume, given)
    (launch_fairseq if is_fairseq(worker_command) else launch_script)(worker_command, options)


@app.command()
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", show_default=False)],
    worker_command: Annotated[list[str], typer.Argument(metavar="-- COMMAND ...", show_default=False)],
    token_file: Annotated[
        Path, typer.Option(metavar="FILE", help="The run's secret: on the server's machine .token in its --save-dir.")
    ],
    tls: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's certificates, where it has --tls.")] = None,
) -> None:
    """Become one more worker of a run that is going on, with the same command as its other workers."""
    from fairseq_async.launch.join import join as begin  # start-up time

    _find(token_file, lambda error: f"--token-file {token_file}: cannot be read: {error}")
    begin(address, worker_command, token_file, tls)


@app.command()
def serve(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", show_default=False)],
    regions: Annotated[int, typer.Option(min=1, help="Number of regions, which are its workers.")],
    run_dir: Annotated[Path, typer.Option(metavar="DIR", help="For events.jsonl, run.json, logs and snapshots.")],
    token_file: Annotated[
        Path, typer.Option(metavar="FILE", help="The run's secret, the same in all regions; only you may read it.")
    ],
    tls: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Encrypt every connection, with the certificates in DIR.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last snapshot in --run-dir.")] = False,
) -> None:
    """Be the global server of several regions, whose own servers are its workers (HALoS): each has --upstream."""
    _find(token_file, lambda error: f"--token-file {token_file}: cannot be read: {error}")
    from fairseq_async.launch.serve import serve as begin  # start-up time

    begin(address, regions, run_dir, token_file, tls, resume)


@app.command(context_settings={"allow_interspersed_args": False})
def worker(
    worker_command: Annotated[list[str], typer.Argument(metavar="-- COMMAND ...", show_default=False)],
) -> None:
    """Become one worker of a run whose workers srun, torchrun or mpirun starts, on one machine or several."""
    from fairseq_async.launch.task import become_worker  # start-up time

    become_worker(worker_command)


@app.command("ray", context_settings={"allow_interspersed_args": False})
def ray_(
    worker_command: Annotated[list[str], typer.Argument(metavar="-- COMMAND ... | scale +N", show_default=False)],
    workers: Annotated[
        str, typer.Option(help="Groups COUNT*CPU or COUNT*GPU, each with :AMOUNT for more than one: 4*GPU,2*CPU:4.")
    ] = "",
    address: Annotated[str, typer.Option(help="Of the Ray cluster; auto is the one of this machine.")] = "auto",
    name: Annotated[str, typer.Option(help="Of the run, where a cluster has several.")] = "training",
    max_restarts: Annotated[int, typer.Option(min=0, help="How often what dies is started again.")] = _MAX_RESTARTS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a script's run that was interrupted; fairseq-train does so.")
    ] = False,
) -> None:
    """Train one job on a Ray cluster; or, with scale +2 or scale -1, change how many workers it has meanwhile."""
    from fairseq_async.ray_launch.resources import parse_change, parse_workers  # start-up time

    scales = worker_command[0] == "scale" and not workers
    change = parse_change(worker_command[1:]) if scales else 0
    wanted = [] if scales else parse_workers(workers)
    try:
        from fairseq_async.ray_launch.run import RayOptions, scale, train
    except ModuleNotFoundError as error:  # ray is an extra
        raise ConfigurationError(f'this needs Ray ({error}): pip install ".[ray]"') from error

    if scales:
        scale(change, address, name)
    else:
        train(worker_command, wanted, RayOptions(address, name, max_restarts, resume))


@app.command()
def certificates(
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    hosts: Annotated[
        list[str], typer.Argument(metavar="HOST...", help="Names and addresses of the server's.", show_default=False)
    ],
) -> None:
    """Make the certificates of a run for --tls: a small authority, the server's certificate and the workers'."""
    try:
        from fairseq_async.launch.certificates import make  # start-up time
    except ModuleNotFoundError as error:  # cryptography is an extra
        raise ConfigurationError(f'certificates need cryptography ({error}): pip install ".[tls]"') from error

    for line in make(directory, hosts):
        print(line)


@app.command()
def audit(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", show_default=False)]) -> None:
    """Show from a run's logs that every update that was acknowledged counts once, or was taken back by a rollback."""
    without = f"{run_dir}: there is no events.jsonl; give the --run-dir or --save-dir of a run"
    _find(run_dir / "events.jsonl", lambda _: without)
    from rich.console import Console  # start-up time

    from fairseq_async.reporting.audit import audit as check
    from fairseq_async.reporting.audit import show

    show(check(run_dir), Console())


@app.command("user-dir")
def print_user_dir() -> None:
    """Print the directory for fairseq's --user-dir."""
    from fairseq_async.launch.command import user_dir  # start-up time

    print(user_dir())


@app.command()
def simulate(
    experiment: Annotated[Path, typer.Argument(help="YAML file; docs/simulator.md has its keys.")],
    out: Annotated[Path | None, typer.Option(help="For all files (default: runs/simulate/NAME).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the simulation in --out.")] = False,
) -> None:
    """Train by several methods on simulated machines: real gradients, a virtual clock, one process."""
    from rich.console import Console  # start-up time

    from fairseq_async.simulation import experiment as experiments

    spell_options(as_key)
    given = experiments.read(experiment)
    from fairseq_async.simulation.simulate import Interrupted, Simulator, table

    directory = out or Path("runs/simulate") / experiment.stem
    try:
        rows = Simulator(given, directory, resume).run()
    except Interrupted:
        line = ["fairseq-async", "simulate", str(experiment), "--out", str(directory), "--resume"]
        print(f"stopped and saved; go on with: {shlex.join(line)}")
        raise typer.Exit(130) from None
    except OSError as error:  # a full disk; --resume goes on when there is room
        raise ConfigurationError(f"--out {directory} cannot be written to: {error.strerror}") from error
    Console(width=None if sys.stdout.isatty() else 140).print(table(rows))
    report([directory], None)


@app.command()
def watch(run_dir: Annotated[Path, typer.Argument(help="--run-dir (or --save-dir) of a run.")]) -> None:
    """Show a run as it goes on, from any machine that sees its directory; Ctrl-C ends the view, not the run."""
    _find(run_dir / "run.json", lambda error: f"{run_dir}: no run there yet ({error})")
    from fairseq_async.reporting.watch import follow  # start-up time

    follow(run_dir)


@app.command()
def capacity(
    run_dir: Annotated[
        Path | None, typer.Argument(help="Of a run of one worker or two, without a barrier.", show_default=False)
    ] = None,
    parameters: Annotated[str, typer.Option(help="Other models than the run's, as 20e6,60e6.")] = "",
    link: Annotated[
        str, typer.Option(help="Workers on other machines: Gbit/s, as 1,10,100; 0.1:50 with 50 ms one way.")
    ] = "",
    servers: Annotated[
        str, typer.Option(help="Shards of the parameters, a server each.", show_default="1,2,4,8; with --workers to 64")
    ] = "",
    compress: Annotated[
        str, typer.Option(metavar="NAME", help="Codecs on the link, as topk,pull=bf16; else as the run has sent.")
    ] = "",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Say which servers, local steps and fragments so many workers need.")
    ] = None,
    step_seconds: Annotated[
        str,
        typer.Option(
            help="Of the workers in turn, as 0.3,0.9; 0.3:0.2 has a spread (deviation over mean).",
            show_default="as the run's",
        ),
    ] = "",
    at_most_waiting: Annotated[
        float | None, typer.Option(help="Share of the workers' time that may be lost.", show_default="0.05")
    ] = None,
) -> None:
    """Say how many workers one server holds, and what sharding would give; or what a cluster needs."""
    from fairseq_async.reporting.capacity_question import read_question  # start-up time

    question = read_question(run_dir, parameters, link, servers, compress, workers, step_seconds, at_most_waiting)
    from rich.console import Console

    from fairseq_async.reporting.capacity_answer import answer

    console = Console(width=None if sys.stdout.isatty() else 140)
    for part in answer(question):
        console.print(part, highlight=False)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs, or of simulations, to lay over each other.")],
    out: Annotated[Path | None, typer.Option(help="For report.html and PNGs (default: report/ in the first).")] = None,
) -> None:
    """Draw runs and simulations: one HTML page that needs no network, and PNGs."""
    for path in runs:
        _find(path, lambda _, path=path: f"{path}: no run and no simulation there (no run.json)")  # type: ignore[misc]
    from fairseq_async.reporting.runs import load  # start-up time

    loaded = load(runs)
    from fairseq_async.reporting import page

    title = ", ".join(path.resolve().name for path in runs)
    print(page.write(loaded, title, out or runs[0] / "report"))


@app.command()
def replay(
    run_dir: Annotated[Path, typer.Argument(help="Of a run of fairseq-train that was started with --record.")],
    until: Annotated[int | None, typer.Option(min=1, help="Stop at this update.")] = None,
) -> None:
    """Repeat a recorded run in one process, bit for bit, and name the first update that differs."""
    path = run_dir.resolve()
    _find(path, lambda _: f"{path}: no run there; give the --run-dir (or --save-dir) of one")
    from rich.progress import Progress  # start-up time

    from fairseq_async.replay import Recording, Replay, quiet

    recording = Recording.read(path)
    if recording.cut:
        print("events.jsonl ends in the middle of a line: the replay goes to the last whole one")
    last = recording.events[-1].version_after
    with quiet(), closing(Replay(recording, _recorded(recording))) as repeated, Progress() as progress:
        task = progress.add_task("replaying", total=min(last, until or last))
        for version in repeated.steps(until):
            progress.update(task, completed=version)
    here = repeated.server.version
    print(f"replayed to update {here} of {last}: {repeated.compared} checksums, all equal to the recorded ones")


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's directory, or a checkpoint.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The file or directory to write.", show_default=False)],
    form: Annotated[
        str,
        typer.Option("--format", help="hf, safetensors, fairseq or state_dict.", show_default="by the suffix of OUT"),
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For hf: where the config.json and the tokenizer of the model are."),
    ] = None,
) -> None:
    """Write the server's parameters for others: an HF directory, safetensors, fairseq's checkpoint, a state dict."""
    forms = ("hf", "safetensors", "fairseq", "state_dict")
    if form and form not in forms:
        raise ConfigurationError(f"--format {form}: one of {', '.join(forms)}")
    _find(source, lambda error: f"{source}: {error.strerror}")
    from fairseq_async.export import Format  # start-up time
    from fairseq_async.export import export as write

    written = write(source, out, Format(form) if form else None, config)
    print(f"{out}: the server's parameters, as {written.value}")


def _recorded(recording: "Recording") -> "Run":
    """What computes a recorded run's updates again."""
    if recording.spec.of_regions:
        from fairseq_async.recorded_regions import RecordedRegions  # start-up time

        return RecordedRegions(recording)
    try:
        from fairseq_async.fairseq_plugin.replayed import FairseqRun  # start-up time
    except ModuleNotFoundError as error:  # fairseq is an extra
        raise ConfigurationError(f'a replay needs fairseq ({error}): pip install ".[fairseq]"') from error
    return FairseqRun(recording.run_dir, recording.spec, recording.events)


def _find(path: Path, otherwise: Callable[[OSError], str]) -> None:
    """Says that a file is missing before the modules that would read it are imported."""
    try:
        path.stat()
    except OSError as error:
        raise ConfigurationError(otherwise(error)) from error


def _factors(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise ConfigurationError(f"--slowdown {text}: numbers with commas between them, as in 1,4") from error


def main() -> None:
    """Runs the command line; a mistake of the user's is one line and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], prog_name="fairseq-async", standalone_mode=False)
    except AsyncError as error:
        _fail(str(error), 2 if isinstance(error, ConfigurationError) else 1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        # typer has click's errors under another name in each version; all say what is wrong by format_message
        if not hasattr(error, "format_message"):
            raise
        program = getattr(getattr(error, "ctx", None), "command_path", "fairseq-async")
        _fail(f"{error.format_message().rstrip('.')}; {program} --help has the options", 2)
    sys.exit(code or 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"fairseq-async: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
