"""Measures the seconds to a loss over a slow line, in fp32 and with each codec: real training on two hosts.

The server and worker 0 are on this host, worker 1 in a network namespace at the other end of a cable. The method is
synchronous local SGD, that is DiLoCo without momentum: a round waits for both workers. So a round takes as long as
worker 1's steps and exchange, and its result for a seed does not depend on the machine's speed. Each run with a codec
follows one in fp32 with the same seed, and is compared with it. Each has its own best outer rate of those given, by the
mean loss of the seeds after as many rounds as fp32 has; runs for this search are over a cable without limits, on which
losses do not depend. Results of runs are kept, and these are not run again.
"""

from __future__ import annotations

import json as jsonlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fairseq_async.environment import SERVER, TOKEN, WORKER  # noqa: E402
from fairseq_async.environment import WORKERS as ANNOUNCED  # noqa: E402
from fairseq_async.errors import ConfigurationError, fail  # noqa: E402
from fairseq_async.records.events import Event  # noqa: E402
from fairseq_async.worker.start.server_process import ServerProcess  # noqa: E402
from recipes.steps import RecipeError, environment, run_main  # noqa: E402
from scripts.bench.kept import Kept  # noqa: E402
from scripts.bench.report import Report  # noqa: E402
from scripts.bench.slow_line_worker import WORKERS, Curve, Job  # noqa: E402
from scripts.faults.hosts import Cable, Host, other_host  # noqa: E402

SERVER_MODULE = "fairseq_async.server.programs.local_sgd_main"
TRAIN = ROOT / "scripts" / "bench" / "slow_line_worker.py"
FP32 = "fp32"
METHOD = {"outer": "diloco", "outer_momentum": 0.0}
COMPRESS = {
    "bf16": "bf16,pull=bf16",
    "int8": "int8,pull=int8",
    "e3m0": "e3m0,pull=int8",
    "topk": "topk,pull=int8",
    "topk256": "topk:keep=256,pull=int8",
    "adacomp": "adacomp,pull=int8",
    "dqsgd": "dqsgd,pull=int8",
    "e3m0_both": "e3m0,pull=e3m0",
    "topk_e3m0": "topk,pull=e3m0",
    "topk256_e3m0": "topk:keep=256,pull=e3m0",
}
SLOWER = ("topk", "e3m0", "adacomp", "dqsgd")  # prefixes of codecs that get more rounds, as they may need them
UNLIMITED = 0.0  # Mbit/s; and no time from end to end
BOUNDED, LEAST_SOONER, BOUNDED_MBIT = ("topk", "e3m0", "e3m0_both", "topk_e3m0", "topk256_e3m0"), 5.0, 10.0


@dataclass(frozen=True)
class Point:
    """A point of a run's loss curve.

    Attributes:
        seconds: seconds since the beginning.
        loss: validation loss of the server's parameters.
        bytes: bytes that worker 1 has sent and received until then.
    """

    seconds: float
    loss: float
    bytes: int


@dataclass(frozen=True)
class Run:
    """The result of one run.

    Attributes:
        points: points at the beginning and after each round.
        exchange: median seconds of worker 1 between its last step of a round and its first one of the next.
        load: load of the machine before the run.
    """

    points: list[Point]
    exchange: float
    load: float


@dataclass(frozen=True)
class Pair:
    """A run in fp32, and the run with a codec that followed it."""

    plain: Run
    coded: Run

    def reached(self) -> tuple[Point | None, Point | None]:
        """Returns the first point of each run at the last loss of the fp32 run, or None if it is not reached."""
        target = self.plain.points[-1].loss
        return first_at(self.plain.points, target), first_at(self.coded.points, target)

    @property
    def sooner(self) -> float:
        """Speedup of the codec's run to the fp32 run's last loss; 0 if it does not reach the loss."""
        plain, coded = self.reached()
        assert plain is not None
        return plain.seconds / coded.seconds if coded is not None else 0.0


def first_at(points: Sequence[Point], loss: float) -> Point | None:
    """Returns the first point with at most this loss, without interpolation between points."""
    return next((point for point in points if point.loss <= loss), None)


def points_of(curve: Curve, events: Sequence[Event], far: int = WORKERS - 1) -> list[Point]:
    """Returns the losses with the time at which the server had the parameters, and worker ``far``'s bytes by then.

    Of a round's updates, only the last one has the version that they make together.
    """
    points = []
    for version, loss in curve.losses:
        at = min(event.time for event in events if event.version_after >= version) if version else curve.started
        until = [event for event in events if event.time <= at and event.worker == far]
        moved = sum((event.bytes_sent or 0) + (event.bytes_received or 0) for event in until)
        points.append(Point(at - curve.started, loss, moved))
    return points


def exchange_of(events: Sequence[Event], far: int = WORKERS - 1) -> float:
    """Returns worker ``far``'s median seconds of an exchange, without its first update, which follows no exchange."""
    return median(event.exchange_seconds for event in [event for event in events if event.worker == far][1:])


class Bench:
    """Runs pairs, each side at its best outer rate, and keeps results in ``out``."""

    def __init__(
        self, data: Path, out: Path, rounds: int, local_steps: int, longer: float, seeds: int, rates: Sequence[float]
    ) -> None:
        self.data, self.out = data, out
        self.rounds, self.local_steps, self.longer = rounds, local_steps, longer
        self.seeds, self.rates = range(1, seeds + 1), sorted(rates)
        self._pairs = Kept(out / "pairs.jsonl", Pair)
        self._losses = Kept(out / "losses.jsonl", float)

    def pairs(self, mbit: float, codec: str) -> list[Pair]:
        """Returns, for each seed, the pair of a run in fp32 and one with the codec."""
        plain, coded = self.best_rate(FP32), self.best_rate(codec)
        found = []
        for seed in self.seeds:
            key = f"{mbit:g} Mbit/s; {codec}; {self._length(codec)}; outer rates {plain:g}, {coded:g}; seed {seed}"
            if key not in self._pairs:
                self._pairs.keep(key, Pair(self._run(mbit, FP32, seed, plain), self._run(mbit, codec, seed, coded)))
            found.append(self._pairs[key])
            print(f"{key}: {found[-1].sooner:.3g} times sooner", file=sys.stderr, flush=True)
        return found

    def best_rate(self, name: str) -> float:
        """Returns the rate with the least loss after as many rounds as fp32 has; of a single one, without a run."""
        return min(self.rates, key=lambda rate: self.loss(name, rate)) if len(self.rates) > 1 else self.rates[0]

    def loss(self, name: str, rate: float) -> float:
        """Returns the mean loss of the seeds after as many rounds as fp32 has."""
        return fmean(self._loss(name, rate, seed) for seed in self.seeds)

    def _loss(self, name: str, rate: float, seed: int) -> float:
        key = f"{name}; {self.rounds} rounds of {self.local_steps}; outer rate {rate:g}; seed {seed}"
        if key not in self._losses:
            self._losses.keep(key, self._run(UNLIMITED, name, seed, rate, self.rounds).points[-1].loss)
            print(f"{key}: loss {self._losses[key]:.4g}", file=sys.stderr, flush=True)
        return self._losses[key]

    def _length(self, name: str) -> str:
        return f"{self._rounds(name)} rounds of {self.local_steps}"

    def _rounds(self, name: str) -> int:
        return math.ceil(self.rounds * self.longer) if name.startswith(SLOWER) else self.rounds

    def _run(self, mbit: float, name: str, seed: int, rate: float, rounds: int | None = None) -> Run:
        load = round(os.getloadavg()[0], 2)
        directory = self.out / f"{name}-{seed}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        total = (rounds or self._rounds(name)) * self.local_steps
        options = METHOD | {"outer_lr": rate, "local_steps": self.local_steps, "total_steps": total}
        options |= {"run_dir": str(directory)} | ({"compress": COMPRESS[name]} if name in COMPRESS else {})
        job = Job(str(self.data), str(self.out), str(directory), seed, options)
        (directory / "job.json").write_text(jsonlib.dumps(asdict(job)))
        with other_host(_cable(mbit)) as host:
            _train(directory, host)
        curve = Curve(**jsonlib.loads((directory / "curve.json").read_text()))
        events = [Event.from_json(line) for line in (directory / "events.jsonl").read_bytes().splitlines()]
        return Run(points_of(curve, events), exchange_of(events), load)


def _cable(mbit: float) -> Cable:
    """Returns a cable of 50 ms from end to end, or one without limits."""
    return Cable() if mbit == UNLIMITED else Cable(seconds=0.05, bytes_per_second=mbit * 1e6 / 8)


def _train(directory: Path, host: Host) -> None:
    """Makes one run, to its end."""
    log = directory / "logs" / "server.log"
    server = ServerProcess(SERVER_MODULE, WORKERS, directory, log, host=host.near, ends_with_workers=True)
    try:
        place = {SERVER: server.address, TOKEN: server.token, ANNOUNCED: str(WORKERS)}
        with _started([(), host.prefix], directory, place) as workers:
            codes = [worker.wait() for worker in workers]
    finally:
        server.stop()
    if any(codes):
        raise RecipeError(f"workers ended with {codes}: see {directory / 'logs'}")


@contextmanager
def _started(
    prefixes: Sequence[tuple[str, ...]], directory: Path, place: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts a worker with each prefix; kills those that have not ended by the end of the block."""
    workers = []
    try:
        for number, prefix in enumerate(prefixes):
            with (directory / "logs" / f"worker-{number}.log").open("w") as log:
                line = [*prefix, sys.executable, str(TRAIN), str(directory / "job.json")]
                own = environment() | place | {WORKER: str(number)}
                workers.append(subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=own))
        yield workers
    finally:
        for worker in workers:
            with suppress(ProcessLookupError):
                worker.kill()
            worker.wait()


def row(codec: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Returns the row of a codec at a rate: values with commas are one per seed, the others means."""
    reached = [pair.reached() for pair in pairs]
    both = [(plain, coded) for plain, coded in reached if plain is not None and coded is not None]
    return {
        "codec": codec,
        "fp32, s": ", ".join(f"{plain.seconds:.1f}" for plain, _ in reached if plain is not None),
        "codec, s": ", ".join(f"{coded.seconds:.1f}" if coded is not None else "never" for _, coded in reached),
        "times sooner": fmean(pair.sooner for pair in pairs),
        "rounds": ", ".join(_rounds(pair) for pair in pairs),
        "fewer bytes to it": fmean(plain.bytes / coded.bytes for plain, coded in both) if both else math.nan,
        "exchange, s": _both(pairs, lambda run: f"{run.exchange:.2f}"),
        "last losses": _both(pairs, lambda run: f"{run.points[-1].loss:.3f}"),
        "loads": _both(pairs, lambda run: f"{run.load:.1f}"),
    }


def losses(bench: Bench, name: str) -> dict[str, Any]:
    """Returns the row of the search for an outer rate: the seeds' mean loss at each one."""
    return {"codec": name} | {f"{rate:g}": bench.loss(name, rate) for rate in bench.rates}


def _both(pairs: Sequence[Pair], what: Callable[[Run], str]) -> str:
    """Formats a figure of each pair's runs as fp32:codec."""
    return ", ".join(f"{what(pair.plain)}:{what(pair.coded)}" for pair in pairs)


def _rounds(pair: Pair) -> str:
    runs = zip(pair.reached(), (pair.plain, pair.coded), strict=True)
    return ":".join("-" if at is None else str(run.points.index(at)) for at, run in runs)


def _numbers(flag: str, given: str) -> list[float]:
    try:
        found = [float(number) for number in given.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"{flag} {given}: numbers with commas between them, as in 10,100") from error
    if any(number <= 0 for number in found):
        raise ConfigurationError(f"{flag} {given}: numbers above 0")
    return found


def _names(given: str) -> list[str]:
    names = given.split(",")
    if unknown := [name for name in names if name not in COMPRESS]:
        raise ConfigurationError(f"--codecs {', '.join(unknown)}: there are {', '.join(COMPRESS)}")
    return names


def main(
    data: Annotated[Path, typer.Option(help="Directory with C4 shards.", exists=True)],
    mbit: Annotated[str, typer.Option(help="Rates of the cable in Mbit/s, with commas between them.")] = "10,100",
    codecs: Annotated[str, typer.Option(help="With commas between them.")] = ",".join(COMPRESS),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 1 to this number.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Of a run.")] = 12,
    longer: Annotated[float, typer.Option(min=1, help="Rounds of all but bf16 and int8, in those of fp32.")] = 2.0,
    local_steps: Annotated[int, typer.Option(min=1, help="H.")] = 10,
    outer_lr: Annotated[str, typer.Option(help="With commas between them; of several, each takes its best.")] = "1",
    out: Annotated[Path, typer.Option(help="What was run, to go on from.")] = Path("runs/bench/slow_lines"),
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the same as JSON.")] = None,
) -> None:
    """Print the seconds to the loss with which the run in fp32 ends; exit code 1 if a bound is broken."""
    report = Report(f"Slow lines: C4 tiny, DiLoCo, H = {local_steps}, {rounds} rounds in fp32, 50 ms from end to end")
    try:
        rates, names = _numbers("--mbit", mbit), _names(codecs)
        bench = Bench(data, out, rounds, local_steps, longer, seeds, _numbers("--outer-lr", outer_lr))
    except ConfigurationError as error:
        fail(error)
    if len(bench.rates) > 1:
        report.table("Loss by outer rate", [losses(bench, name) for name in (FP32, *names)])
    found = {(rate, codec): bench.pairs(rate, codec) for rate in rates for codec in names}
    for rate in rates:
        report.table(f"{rate:g} Mbit/s", [row(codec, pairs) for (at, codec), pairs in found.items() if at == rate])
    for (rate, codec), pairs in found.items():
        if rate == BOUNDED_MBIT and codec in BOUNDED:
            sooner = fmean(pair.sooner for pair in pairs)
            report.bound(f"{codec} at {rate:g} Mbit/s, times sooner", sooner, LEAST_SOONER, at_least=True)
    report.end(json)


if __name__ == "__main__":
    run_main(main)
