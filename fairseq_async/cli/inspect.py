"""Commands that say what a run has done, and what others would."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fairseq_async.cli.paths import find
from fairseq_async.reporting import GIVE_A_RUN

_RUN = "Directory of a run: its --run-dir, by default --save-dir."
app = typer.Typer()


@app.command()
def audit(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help=_RUN, show_default=False)]) -> None:
    """Show from a run's logs that every update that was acknowledged counts once, or was taken back by a rollback."""
    without = f"{run_dir}: there is no events.jsonl; {GIVE_A_RUN}"
    find(run_dir / "events.jsonl", lambda _: without)
    from fairseq_async.launch.progress.display import plain_console  # start-up time
    from fairseq_async.reporting.audit import audit as check
    from fairseq_async.reporting.audit import show

    show(check(run_dir), plain_console())


@app.command()
def watch(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help=_RUN, show_default=False)]) -> None:
    """Show a run as it goes on, from any machine that sees its directory; Ctrl-C ends the view, not the run."""
    find(run_dir / "run.json", lambda why: f"{run_dir}: no run there yet (run.json: {why}); {GIVE_A_RUN}")
    from fairseq_async.reporting.watch import follow  # start-up time

    follow(run_dir)


@app.command()
def capacity(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR", help="Directory of a run of one worker or two, without a barrier.", show_default=False
        ),
    ],
    parameters: Annotated[
        str, typer.Option(metavar="N,…", help="Numbers of parameters of other models than the run's: 20e6,60e6.")
    ] = "",
    link: Annotated[
        str,
        typer.Option(
            metavar="X,…",
            help="Speeds in Gbit/s of the line to workers on other machines: 1,10,100; 0.1:50 has 50 ms one way.",
        ),
    ] = "",
    shards: Annotated[
        str,
        typer.Option(
            "--shards",
            "--servers",
            metavar="S,…",
            help="Numbers of processes of the server, each on its own core.",
        ),
    ] = "1,2,4,8",
    apart: Annotated[
        bool,
        typer.Option(
            "--apart",
            help="Each shard is on a machine of its own, with a link of its own (addresses in --server-shards).",
        ),
    ] = False,
    compress: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Codecs of updates and parameters, as in topk,pull=bf16.",
            show_default="those of the run",
        ),
    ] = "",
) -> None:
    """Say how many workers one server holds, and what sharding would give."""
    from fairseq_async.reporting.capacity_question import check_run, read_question  # start-up time

    check_run(run_dir)
    question = read_question(parameters, link, shards, apart, compress)
    from fairseq_async.launch.progress.display import plain_console  # start-up time
    from fairseq_async.reporting.capacity import answer

    console = plain_console(width=None if sys.stdout.isatty() else 140)
    for table in answer(run_dir, question):
        console.print(table, highlight=False)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR", help="Directories of runs, or of simulations, to compare.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory for report.html and the PNGs.",
            show_default="report/ in the first RUN_DIR",
        ),
    ] = None,
) -> None:
    """Draw runs and simulations: one HTML page that needs no network, and PNGs."""
    for path in runs:
        none = f"{path}: no run and no simulation there (no run.json); {GIVE_A_RUN}"
        find(path, lambda _, none=none: none)  # type: ignore[misc]
    from fairseq_async.reporting.runs import load, name_of  # start-up time

    loaded = load(runs)
    from fairseq_async.reporting import page

    title = ", ".join(map(name_of, runs))
    print(page.write(loaded, title, out or runs[0] / "report"))
