"""``fairseq-async simulate``: runs each method of an experiment on each cluster, from one state, on the same data."""

import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.progress.display import plain_console
from fairseq_async.simulation.cluster import Cluster
from fairseq_async.simulation.experiment import Experiment, Method, ScheduleOptions
from fairseq_async.simulation.hierarchy import simulated_run
from fairseq_async.simulation.problems import problem as problems
from fairseq_async.simulation.records import Records, first_time, read_lines, write_whole
from fairseq_async.simulation.schedule import LearningRate
from fairseq_async.simulation.simulated_run import SimulatedRun
from fairseq_async.simulation.trial import Write
from fairseq_async.simulation.workers import SharedModel
from fairseq_async.worker.shards import ShardOrder, shard_sizes

Summary = dict[str, Any]  # of one trial: what ``summary.json`` holds
_Content = TypeVar("_Content")
_RECORD = "experiment.json"
_SAVE_EVERY = 120.0  # seconds of work that may be lost when the machine goes down


class Interrupted(Exception):
    """Raised by Ctrl-C, after the state is saved."""


@dataclass(frozen=True)
class Pair:
    """One method on one cluster."""

    method: Method
    cluster_name: str
    cluster: Cluster

    @property
    def name(self) -> str:
        """The name to show to people: the method, and the cluster where there are several."""
        return self.method.name + (f", {self.cluster_name}" if self.cluster_name else "")

    def directory(self, out: Path) -> Path:
        """Returns the directory of the trial's files."""
        return out / _file_name(self.cluster_name) / _file_name(self.method.name)


class Simulator:
    """Runs all trials of an experiment and writes their files into a directory.

    Args:
        resume: whether to go on with what is there; a trial that is finished is not run again.

    Raises:
        ConfigurationError: the directory holds something else, or the experiment's problem cannot be built.
    """

    def __init__(self, experiment: Experiment, out: Path, resume: bool) -> None:
        self.experiment, self.out = experiment, out
        self.console = plain_console(stderr=True)
        self._check_out(resume)
        self.pairs = [Pair(m, name, c) for name, c in experiment.clusters.items() for m in experiment.methods]
        self._check_names()
        directory = experiment.path.resolve().parent
        problem = problems.build(experiment.head.problem, directory, experiment.seed, _device(experiment.head.device))
        workers = max(cluster.workers for cluster in experiment.clusters.values())
        if problem.samples < workers:
            raise ConfigurationError(f"the problem has {problem.samples} samples for {workers} workers")
        if experiment.head.batch_size > problem.samples:
            size = experiment.head.batch_size
            raise ConfigurationError(f'"batch_size" is {size}: the problem has {problem.samples} samples')
        order = ShardOrder([problem.samples], experiment.seed)
        head = experiment.head
        self.model = SharedModel(problem, head.batch_size, order, experiment.seed, head.bf16)
        self._check_pairs()
        self._stop = False
        self._claim_out()

    def run(self) -> list[Summary]:
        """Runs the trials that are not finished; returns the summaries of all.

        Raises:
            Interrupted: by Ctrl-C; the second one ends the process at once.
        """
        before = signal.signal(signal.SIGINT, self._interrupt)
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        try:
            with Progress(*columns, console=self.console) as self.progress:
                start = self._start()
                steps = [self.experiment.steps * pair.cluster.workers for pair in self.pairs]
                task = self.progress.add_task("", total=sum(steps))
                done, rows = 0, []
                for pair, own in zip(self.pairs, steps, strict=True):
                    self.progress.update(task, description=pair.name, completed=done)
                    rows.append(self._run(pair, start, task, done))
                    done += own
                self.progress.update(task, description="", completed=done)
        finally:
            signal.signal(signal.SIGINT, before)
        self._add_targets(rows)
        write_whole(self.out / "results.json", {"experiment": str(self.experiment.path), "trials": rows})
        return rows

    def _check_out(self, resume: bool) -> None:
        record = self.out / _RECORD
        if record.exists() and not resume:
            raise ConfigurationError(f"--out {self.out} holds a simulation: go on with it by --resume, or change --out")
        if record.exists() and _read(record, _json) != json.loads(json.dumps(self.experiment.raw)):
            raise ConfigurationError(f"--out {self.out} holds a simulation of another experiment: change --out")

    def _check_names(self) -> None:
        """Refuses names by which the files of two trials would be in one directory, and be taken for each other."""
        taken: dict[Path, str] = {}
        for pair in self.pairs:
            directory = pair.directory(self.out)
            if directory in taken:
                raise ConfigurationError(
                    f"{self.experiment.path}: the files of {taken[directory]} and of {pair.name} would both be in "
                    f"{directory}: rename one of them"
                )
            taken[directory] = pair.name

    def _check_pairs(self) -> None:
        """Builds each trial once, so that what cannot work is said now, and not after hours of other trials."""
        for pair in self.pairs:
            try:
                self._build(pair, self.model.flat, write=lambda *_: None)
            except ConfigurationError as error:
                raise ConfigurationError(f"{self.experiment.path}, method {pair.name}: {error}") from error
        self.model.live_in(self.model.flat)

    def _build(self, pair: Pair, start: Tensor, write: Write) -> SimulatedRun:
        self._divide_data(pair.cluster.workers)
        return simulated_run(self.experiment, pair.method, pair.cluster, self.model, start, write)

    def _divide_data(self, workers: int) -> None:
        """Gives each worker its part of the data."""
        self.model.order = ShardOrder(shard_sizes(self.model.problem.samples, workers), self.experiment.seed)

    def _claim_out(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--out {self.out} cannot be made: {error.strerror}") from error
        write_whole(self.out / _RECORD, self.experiment.raw)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _start(self) -> Tensor:
        """Returns the parameters with which every trial begins: from ``start.pt``, or else made and saved there."""
        path, wanted = self.out / "start.pt", self.experiment.pretraining
        if path.exists():
            start: Tensor = _read(path, partial(torch.load, map_location=self.model.flat.device, weights_only=True))
            return start
        if wanted is not None:
            task = self.progress.add_task("pretraining", total=None)
            options = self.experiment.optimizer
            schedule = ScheduleOptions(warmup=self.experiment.schedule.warmup)
            rate = LearningRate(schedule, wanted.lr or options.lr, wanted.steps)
            self._divide_data(1)  # a trial that was built has left its workers' parts
            self.model.pretrain(options, rate, wanted.steps)
            self.progress.remove_task(task)
        start = self.model.flat.clone()
        torch.save(start, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)
        return start

    def _run(self, pair: Pair, start: Tensor, task: TaskID, done: int) -> Summary:
        records = Records(pair.directory(self.out))
        if (summary := records.summary) is not None:
            return summary
        trial = self._build(pair, start, records.write)
        records.open(trial, name=pair.method.name, cluster=pair.cluster_name, number=self.pairs.index(pair))
        if not records.curve:
            records.evaluate(trial)
        every, began = self.experiment.evaluate_every * pair.cluster.workers, time.monotonic()
        saved = began
        while trial.advance():
            if trial.steps // every > records.curve[-1]["steps"] // every:
                records.evaluate(trial)
            self.progress.update(task, completed=done + trial.steps)
            if self._stop or time.monotonic() > saved + _SAVE_EVERY:
                records.save(trial)
                saved = time.monotonic()
            if self._stop:
                raise Interrupted
        last = records.curve[-1]
        if (last["steps"], last["updates"]) < (trial.steps, trial.version):
            records.evaluate(trial)
        names = {"method": pair.method.name, "cluster": pair.cluster_name}
        return records.end(trial, names, time.monotonic() - began)

    def _add_targets(self, rows: list[Summary]) -> None:
        """Adds to each summary the target loss and when the trial first reached it, in virtual seconds."""
        target = self.experiment.target
        if target is None:
            return
        for pair, row in zip(self.pairs, rows, strict=True):
            aim = target.loss
            if target.of is not None:
                aim = next(r["loss"] for r in rows if r["method"] == target.of and r["cluster"] == row["cluster"])
            row["target"] = None if aim is None else aim * (1 + target.within)
            curve = read_lines(pair.directory(self.out) / "curve.jsonl")
            row["time_to_target"] = None if aim is None else first_time(curve, row["target"])


def table(rows: list[Summary]) -> Table:
    """Makes the table that ``simulate`` prints at its end."""
    table = Table(box=box.SIMPLE)
    clusters = any(row["cluster"] for row in rows)
    target = any("target" in row for row in rows)
    remarks = any(row["remark"] for row in rows)
    columns = ["cluster"] * clusters + ["method", "loss", "ppl", "updates", "tokens", "virtual s"]
    columns += ["s to target"] * target + ["staleness", "most"] + [""] * remarks
    for column in columns:
        table.add_column(column, justify="left" if column in ("cluster", "method", "") else "right")
    for row in rows:
        cells = [row["cluster"]] * clusters + [row["method"], *_loss(row["loss"]), f"{row['updates']:,}"]
        cells += [f"{row['tokens']:,.0f}", f"{row['time']:,.1f}"]
        if target:
            reached = row.get("time_to_target")
            cells.append("never" if reached is None else f"{reached:,.1f}")
        table.add_row(*cells, f"{row['staleness']:.2f}", str(row["largest_staleness"]), *[row["remark"]] * remarks)
    return table


def _loss(loss: float | None) -> list[str]:
    if loss is None or not math.isfinite(loss):
        return ["-", "-"]
    return [f"{loss:.4f}", f"{math.exp(loss):,.2f}" if loss < 50 else "-"]


def _file_name(name: str) -> str:
    """Returns a directory name for the name of a method or cluster; the current directory for an empty name."""
    if not name:
        return "."
    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in name.replace("+", "and"))
    return plain if plain.strip(".") else f"_{plain}"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the second where torch has no CUDA
        why = str(error).partition("\n")[0]
        raise ConfigurationError(f'"device": {name} cannot be used: {why}') from error
    return device


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _read(path: Path, load: Callable[[Path], _Content]) -> _Content:
    """Loads a file that an earlier simulation has left.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        return load(path)
    except Exception as error:  # torch raises whatever the broken bytes lead it to
        why = str(error).partition("\n")[0]
        raise ConfigurationError(f"{path} cannot be read: {why}; remove it, or give another --out") from error
