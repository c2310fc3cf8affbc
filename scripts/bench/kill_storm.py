"""``python scripts/bench/kill_storm.py [--seconds 120] [--faults-per-hour 600]``: the work that a storm of kills costs.

Runs a small model with two workers under ``fairseq-async launch``, and kills its processes by SIGKILL, at random but
the same in each run: the server, its standby, both at once, or a worker. Prints the share of useful work, as
``scripts/chaos.py`` does, the time from a server's death to the next applied update, and what an audit finds.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_async.reporting.audit import audit
from scripts.bench.restart_times import ROOT, SCRIPT, servers, wait_for_update
from scripts.storm_figures import Log, useful_share, waits

KINDS = {"server": 6, "standby": 1, "server and standby": 1, "worker": 2}  # how often each, of ten


def workers(launcher: int) -> list[tuple[int, int]]:
    """Returns the launcher's workers, each with its number and process."""
    found = []
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        numbers = [int(each.split(b"=")[1]) for each in environment if each.startswith(b"FAIRSEQ_ASYNC_WORKER=")]
        found += [(number, int(child)) for number in numbers]
    return sorted(found)


def killed(kind: str, chosen: random.Random, launcher: int, run_dir: Path) -> tuple[int | None, list[int]]:
    """Returns the worker that is to die, or None for the server, and the processes."""
    if kind == "worker":
        number, process = chosen.choice(workers(launcher))
        return number, [process]
    there = servers(run_dir)
    return None, {"server": there[:1], "standby": there[1:], "server and standby": there}[kind]


def moments(seconds: float, gap: float, launcher: int, run_dir: Path) -> Iterator[dict[str, Any]]:
    """Kills, and yields what ``timeline.json`` tells of it."""
    chosen, began = random.Random(1), time.time()
    yield {"what": "begin", "time": began, "worker": None}
    for number in range(int(seconds / gap)):
        time.sleep(max(0.0, began + (number + chosen.uniform(0.1, 0.9)) * gap - time.time()))
        [kind] = chosen.choices(list(KINDS), list(KINDS.values()))
        worker, processes = killed(kind, chosen, launcher, run_dir)
        now = time.time()
        moment: dict[str, Any] = {"time": now, "worker": worker}
        for process in processes:
            os.kill(process, signal.SIGKILL)
        print(f"  {now - began:6.1f} s: {kind}{'' if worker is None else f' {worker}'}", flush=True)
        yield moment | {"what": "fault", "kind": "kill" if kind != "standby" else kind}
        if worker is not None:
            yield moment | {"what": "death"}
            yield moment | {"what": "start"}
    time.sleep(max(0.0, began + seconds - time.time()))
    yield {"what": "end", "time": time.time(), "worker": None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--faults-per-hour", type=float, default=600.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir, script = Path(folder) / "run", Path(folder) / "train.py"
        script.write_text(SCRIPT.replace("total_steps", "snapshot_seconds=0.25, worker_timeout=10, total_steps"))
        line = [sys.executable, "-m", "fairseq_async", "launch", "--workers", "2", "--max-restarts", "1000"]
        launcher = subprocess.Popen(
            [*line, "--", "python", str(script), str(run_dir)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for_update(run_dir, 0.0)
            time.sleep(10)
            storm = list(moments(options.seconds, 3600 / options.faults_per_hour, launcher.pid, run_dir))
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait(60)
        (run_dir / "timeline.json").write_text(json.dumps(storm))
        log, found = Log(run_dir), audit(run_dir)
        times = " ".join(f"{each:.2f}" for each in waits(log, log.kills(None)))
        print(f"{len(log.faults)} faults in {options.seconds:g} s, {len(os.sched_getaffinity(0))} cores")
        print(f"useful work {100 * useful_share(log):.1f}%, load {os.getloadavg()[0]:.1f}")
        print(f"seconds from the server's death to an update: {times}")
        taken_back = sum(found.rolled_back.values())
        print(f"audit: {found.applied:,} applied, {taken_back:,} rolled back, {found.bad or 'clean'}")


if __name__ == "__main__":
    main()
