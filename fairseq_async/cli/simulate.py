"""Commands that compute: a simulation, a replay; and the parameters in another form."""

import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairseq_async.cli.inspect import report
from fairseq_async.cli.paths import find
from fairseq_async.errors import GIVE_A_MODEL, ConfigurationError, as_key, spell_options
from fairseq_async.reporting import GIVE_A_RUN

if TYPE_CHECKING:
    from fairseq_async.replay.replay import RecordedRun, Recording

app = typer.Typer()


@app.command()
def simulate(
    experiment: Annotated[
        Path,
        typer.Argument(metavar="EXPERIMENT", help="YAML file; docs/simulator.md has its keys.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory for all files.", show_default="runs/simulate/ and the name of EXPERIMENT"
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the simulation in --out.")] = False,
) -> None:
    """Train by several methods on simulated machines: real gradients, a virtual clock, one process."""
    from fairseq_async.simulation import experiment as experiments  # start-up time

    spell_options(as_key)
    given = experiments.read(experiment)
    from fairseq_async.launch.progress.display import plain_console  # start-up time
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
    plain_console(width=None if sys.stdout.isatty() else 140).print(table(rows))
    report([directory], None)


@app.command()
def replay(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR",
            help="Directory of a run of fairseq-train that was started with --record.",
            show_default=False,
        ),
    ],
    until: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop at this version_after of events.jsonl.")
    ] = None,
) -> None:
    """Repeat a recorded run in one process, bit for bit, and name the first update that differs."""
    find(run_dir, lambda _: f"{run_dir.absolute()}: no run there; {GIVE_A_RUN}")
    path = run_dir.resolve()  # of a link in a circle this would be no OSError
    from rich.progress import Progress  # start-up time

    from fairseq_async.replay.replay import Recording, Replay, quiet

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
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File or directory to write.", show_default=False)],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="One of hf, safetensors, fairseq and state_dict.",
            show_default="by the suffix of OUT",
        ),
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For hf: directory of config.json (adapter_config.json) and tokenizer."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For hf: the model into which an adapter of PEFT is merged."),
    ] = None,
) -> None:
    """Write the server's parameters for others: an HF directory, safetensors, fairseq's checkpoint, a state dict."""
    forms = ("hf", "safetensors", "fairseq", "state_dict")
    if form and form not in forms:
        raise ConfigurationError(f"--format {form}: one of {', '.join(forms)}")
    find(source, lambda why: f"{source}: {why}; {GIVE_A_MODEL}")
    from fairseq_async.export import Format  # start-up time
    from fairseq_async.export import export as write

    written = write(source, out, Format(form) if form else None, config, base)
    print(f"{out}: the server's parameters, as {written.value}")


def _recorded(recording: "Recording") -> "RecordedRun":
    """What computes a recorded run's updates again."""
    if recording.spec.of_regions:
        from fairseq_async.replay.regions import RecordedRegions  # start-up time

        return RecordedRegions(recording)
    try:
        from fairseq_async.fairseq_plugin.replayed import FairseqRun  # start-up time
    except ModuleNotFoundError as error:  # fairseq is an extra
        raise ConfigurationError(f'a replay needs fairseq ({error}): pip install ".[fairseq]"') from error
    return FairseqRun(recording.run_dir, recording.spec, recording.events)
