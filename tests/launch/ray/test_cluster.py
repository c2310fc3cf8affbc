"""Runs on a Ray cluster of three nodes that are all this machine: real actors, real processes, real deaths."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command.command import WorkerCommand
from fairseq_async.launch.ray.resources import Resources
from fairseq_async.reporting.audit import audit
from tests.helpers.commands import HELPERS, HYBRID, MODEL, ROOT, Processes, command
from tests.helpers.documents import script_of_the_readme
from tests.helpers.forking import USUAL
from tests.helpers.launched import count, find
from tests.helpers.run_files import events, write_timed_run
from tests.helpers.waiting import wait_until

pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402  # skipped without it

from fairseq_async.launch.ray.cluster import connect  # noqa: E402  # it needs Ray as well
from fairseq_async.launch.ray.run import RayOptions, RayRun  # noqa: E402

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
SLOWLY = {"total_steps=200": "total_steps=100_000, server_shards=2", ".step()\n": ".step()\n        time.sleep(0.01)\n"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Its sockets need a short path; its actors would have the lowest priority on a machine that others use."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    (folder / "ray").mkdir()  # Ray expects it
    variables = {"RAY_TMPDIR": folder, "RAY_worker_niceness": 0, "RAY_memory_monitor_refresh_ms": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**variables, "PYTHONPATH": f"{HELPERS / 'for_translation_alone'}:{ROOT}"}.items():
            patch.setenv(name, str(value))
        patch.setattr(subprocess, "Popen", USUAL)  # a driver has threads of Ray's, which a fork would not have
        nodes = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            for _ in range(2):
                nodes.add_node(**NODE)
            yield nodes
        finally:
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def under_ray(cluster: Cluster, *words: object) -> list[object]:
    return [command("fairseq-async"), "ray", "--address", cluster.address, *words]


def script(folder: Path) -> list[object]:
    text = script_of_the_readme()
    for old, new in SLOWLY.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "train.py").write_text(f"import time\n{text}")
    return ["--", sys.executable, folder / "train.py"]


def wait_for_updates(run: Path, workers: int, more: int = 2) -> None:
    """Of each of these workers so many more than now. The third was added: where it is started again, the server may
    give it another number, as its predecessor may still come back."""

    def counts() -> list[int]:
        return [count(run, 0), count(run, 1), sum(count(run, added) for added in range(2, 9))][:workers]

    before = counts()
    wait_until(lambda: all(now >= done + more for now, done in zip(counts(), before, strict=True)), 120)


def end(driver: "subprocess.Popen[str]", number: signal.Signals) -> str:
    driver.send_signal(number)
    return driver.communicate(timeout=90)[0]


@pytest.mark.timeout(900)  # it starts ten processes one after another
def test_a_run_outlives_a_node_a_shard_and_the_servers_actor_and_goes_on_after_its_driver(
    cluster: Cluster, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, line = tmp_path / "async_training", script(tmp_path)
    driver = processes.start(under_ray(cluster, "--workers", "2*CPU", *line))
    wait_for_updates(run, workers=2)
    assert processes.run(under_ray(cluster, "scale", "+1"))[0] == 0
    wait_for_updates(run, workers=3)

    cluster.remove_node(list(cluster.worker_nodes)[0], allow_graceful=False)
    cluster.add_node(**NODE)
    wait_for_updates(run, workers=3)

    (server,) = find(run, r"fairseq_async\.server")
    actor = _parent(server)  # not of the standby that becomes the server
    shard, *_ = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    os.kill(int(shard), signal.SIGKILL)
    wait_until(lambda: server not in find(run, r"fairseq_async\.server"), 60)
    wait_for_updates(run, workers=3)

    (server,) = find(run, r"fairseq_async\.server")
    os.kill(actor, signal.SIGKILL)
    wait_until(lambda: server not in find(run, r"fairseq_async\.server"), 60)
    wait_for_updates(run, workers=3)

    assert processes.run(under_ray(cluster, "scale", "-1"))[0] == 0
    wait_until(lambda: not find(tmp_path, r"FAIRSEQ_ASYNC_WORKER=join"), 60)
    code, said = processes.run(under_ray(cluster, "--workers", "1*CPU", *line))
    assert code == 2 and "--name training: another run has this name" in said.splitlines()[-1]

    driver.kill()
    driver.wait()
    wait_until(lambda: not find(run, r"fairseq_async\.server"), 60)
    driver = processes.start(under_ray(cluster, "--workers", "2*CPU", "--resume", *line))
    wait_until(lambda: len(find(tmp_path, "FAIRSEQ_ASYNC_WORKER=")) == 2, 60)
    wait_for_updates(run, workers=2)
    said = end(driver, signal.SIGINT)
    assert driver.returncode == 130 and re.search(
        r"all is kept up to step [\d,]+ of 100,000; go on with: fairseq-async ray --", said
    ), said
    assert not find(tmp_path, ".")
    audit(run)


@pytest.mark.parametrize("shards", [1, 2])
def test_fairseq_trains_to_the_same_bits_as_on_one_machine(
    cluster: Cluster, processes: Processes, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    """A barrier makes the order in which the workers' gradients come the same to it. On the cluster, the second shard
    is on another node."""
    monkeypatch.chdir(tmp_path)
    flags = [*HYBRID, "--barrier", "--inner-optimizer", "adam", "--max-update", 8, "--record", "--no-save"]
    launchers = {
        "ray": under_ray(cluster, "--workers", "2*CPU", "--shards", shards),
        "launch": [command("fairseq-async"), "launch", "--workers", 2],
    }
    sums = {}
    for name, launcher in launchers.items():
        own = [] if name == "ray" else ["--server-shards", shards]
        line = [*launcher, "--", "fairseq-train", data, *MODEL, *flags, *own]
        code, said = processes.run([*line, "--save-dir", tmp_path / name], 200)
        assert code == 0 and "finished: update 8 of 8" in said, said
        sums[name] = {event["version_after"]: event.get("checksum") for event in events(tmp_path / name)}
    assert sums["ray"] == sums["launch"] and len(sums["ray"]) > 7
    audit(tmp_path / "ray")
    logs = sorted(path.name for path in (tmp_path / "ray" / "logs").glob("shard-*.log"))
    assert logs == [f"shard-{number}.log" for number in range(1, shards)]


def test_a_run_outlives_a_shard_on_another_node_and_its_actor(
    cluster: Cluster, processes: Processes, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [*HYBRID, "--inner-optimizer", "adam", "--max-update", 400, "--snapshot-seconds", 1, "--no-save"]
    ray = under_ray(cluster, "--workers", "2*CPU", "--shards", 2)
    driver = processes.start([*ray, "--", "fairseq-train", data, *MODEL, *flags, "--save-dir", tmp_path / "run"])
    wait_for_updates(tmp_path / "run", workers=2)
    for victim in ("shard", "its actor"):
        (shard,) = _shards_below(tmp_path / "run")
        os.kill(shard if victim == "shard" else _parent(shard), signal.SIGKILL)
        wait_until(lambda gone=shard: _shards_below(tmp_path / "run") not in ([], [gone]), 90)  # type: ignore[misc]
        wait_for_updates(tmp_path / "run", workers=2)
    said, _ = driver.communicate(timeout=180)
    assert driver.returncode == 0 and "finished: update 400 of 400" in said, said
    assert audit(tmp_path / "run").rolled_back
    assert not _shards_below(tmp_path / "run")


def _shards_below(run: Path) -> list[int]:
    """The processes of ``fairseq-async shard`` whose output goes to this run's directory."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "fd" / "1").readlink().is_relative_to(run / "logs") and b"\0shard\0" in (
                folder / "cmdline"
            ).read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_script_that_fails_at_once_is_not_started_for_ever(
    cluster: Cluster, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text('raise ValueError("no such thing")\n')
    code, said = processes.run(under_ray(cluster, "--workers", "1*CPU", "--", sys.executable, "bad.py"))
    assert code == 1 and said.endswith("error: worker 0 ended with code 1: ValueError: no such thing\n"), said
    assert re.search(r'^  File ".*bad.py", line 1', said, re.MULTILINE), "its log is removed, so its traceback is shown"
    assert [path.name for path in tmp_path.iterdir()] == ["bad.py"]


def test_a_command_that_is_interrupted_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is before the first update; and the command to go on with has no flag that would begin anew."""
    line = ["fairseq-train", "data", "--optimizer", "hybrid_async", "--save-dir", str(tmp_path / "run")]
    begins = ["--restore-file", "x.pt", "--reset-optimizer"]
    monkeypatch.setattr(sys, "argv", ["fairseq-async", "ray", "--workers", "2*CPU", "--", *line, *begins])
    monkeypatch.setattr("fairseq_async.launch.ray.run.Actors", MagicMock())
    monkeypatch.setattr(RayRun, "_watch", MagicMock(side_effect=KeyboardInterrupt))

    def said() -> str:
        command, options = WorkerCommand([*line, *begins], 2), RayOptions("auto", "training", 0, False)
        with pytest.raises(KeyboardInterrupt):
            RayRun(command, tmp_path, [Resources(1, 0)] * 2, options).run()
        return capsys.readouterr().err.splitlines()[-1]

    assert said() == "interrupted before the first update: there is nothing to go on from"
    write_timed_run(tmp_path / "run", workers=1, step=0.1, exchange=0.1, server=0.1, updates=4)
    (tmp_path / "run" / "snapshots").mkdir()
    (tmp_path / "run" / "snapshots" / "version-000000000003.pt").touch()
    again = f"fairseq-async ray --workers '2*CPU' -- {shlex.join(line)}"
    assert said() == f"all is kept up to update 3; go on with: {again}"


def test_an_address_where_no_cluster_is_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"^--address 127\.0\.0\.1:1: no Ray cluster there \("):
        connect("127.0.0.1:1")
    with pytest.raises(ConfigurationError, match="an address is written HOST:PORT"):
        connect("nonsense")
