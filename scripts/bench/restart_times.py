"""``python scripts/bench/restart_times.py``: the time from kill -9 of the server to the next applied update.

Runs a small model with two workers under ``fairseq-async launch``, kills its server nine times, and prints the median,
with and without a standby, and what the standby takes of memory.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
KILLS, SETTLED = 9, 8.0  # seconds between two kills
SCRIPT = """
import sys, time, torch
from fairseq_async.torch import HybridAsync

torch.manual_seed(0)
model = torch.nn.Linear(1000, 100)
optimizer = torch.optim.AdamW(model.parameters())
with HybridAsync(model, optimizer, run_dir=sys.argv[1], no_standby=len(sys.argv) > 2, total_steps=10**9) as worker:
    while not worker.finished:
        optimizer.zero_grad()
        model(torch.randn(16, 1000)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
"""


def servers(run_dir: Path) -> list[int]:
    """Returns the processes of the server's program: the server, and then its standby."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent, start = [int((folder / "stat").read_text().rpartition(")")[2].split()[field]) for field in (1, 19)]
        except OSError:
            continue
        if str(run_dir).encode() in words and b"--notices" in words:
            found[int(folder.name)] = parent, start
    return sorted((each for each in found if found[each][0] not in found), key=lambda each: found[each][1])


def wait_for_update(run_dir: Path, since: float) -> float:
    """Waits for an update that was applied after this time, and returns the seconds between."""
    path, deadline = run_dir / "events.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline:
        lines = path.read_bytes().splitlines()[-3:-1] if path.exists() else []
        times = [event["time"] for event in map(json.loads, lines) if event["status"] == "applied"]
        if times and times[-1] > since:
            return float(min(each for each in times if each > since)) - since
        time.sleep(0.005)
    raise SystemExit("the server did not come back")


def measure(folder: Path, *flags: str) -> list[float]:
    """Returns the seconds of each kill."""
    run_dir, script = folder / "run", folder / "train.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "fairseq_async", "launch", "--workers", "2", "--max-restarts", str(KILLS)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    line += ["--", "python", str(script), str(run_dir), *flags]
    launcher = subprocess.Popen(line, env=variables, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_update(run_dir, 0.0)
        found: list[float] = []
        for _ in range(KILLS):
            time.sleep(SETTLED)
            server, *standby = servers(run_dir)
            for each in standby[:1] if not found else []:
                sizes = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
                print(
                    "  standby:",
                    ", ".join(" ".join(s.split()) for s in sizes if s.startswith(("Rss", "Pss:", "Private_Dirty"))),
                )
            began = time.time()
            os.kill(server, signal.SIGKILL)
            found.append(wait_for_update(run_dir, began))
        return found
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.wait(60)


def main() -> None:
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; seconds from kill -9 to an update")
    for name, flags in (("with a standby", ()), ("without", ("--no-standby",))):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), *flags)
        values = " ".join(f"{each:.2f}" for each in found)
        print(f"{name}: median {statistics.median(found):.2f} of {values}; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
