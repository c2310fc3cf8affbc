"""The commands that begin a run hand each flag to what begins it."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fairseq_async.cli.program import app
from fairseq_async.launch import join, serve, shard, start, task
from fairseq_async.launch.options import LaunchOptions

Called = list[tuple[Any, ...]]
SCRIPT = ["--", "python", "x.py"]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    calls: Called = []
    begins = {start: ("launch_fairseq", "launch_script"), join: ("join",), serve: ("serve",), shard: ("hold",)}
    for module, names in (begins | {task: ("become_worker",)}).items():
        for name in names:
            monkeypatch.setattr(module, name, lambda *given, name=name: calls.append((name, *given)))
    return calls


def call(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def test_a_launcher_has_its_flags_and_knows_which_were_given(called: Called, tmp_path: Path) -> None:
    call("launch", "--workers", 2, *SCRIPT)
    call("launch", "--workers", 2, "--max-restarts", 0, "--port", 7, "--tls", tmp_path, "--resume", *SCRIPT)
    own = ["--host", "0.0.0.0", "--token-file", tmp_path / "token", "--slowdown", "1,4", "--ranks-per-worker", "2,1"]
    call("launch", "--workers", 2, *own, "--", "fairseq-train", "data")
    given = ["--max-restarts", "--tls"]
    plain = LaunchOptions(2, 3, [1, 1], [], asynchronous=[])
    restarts = LaunchOptions(2, 0, [1, 1], [], port=7, tls=tmp_path, resume=True, asynchronous=given)
    given = ["--slowdown", "--host", "--token-file", "--ranks-per-worker"]
    remote = LaunchOptions(2, 3, [2, 1], [1.0, 4.0], 0, "0.0.0.0", tmp_path / "token", asynchronous=given)
    assert called == [
        ("launch_script", ["python", "x.py"], plain),
        ("launch_script", ["python", "x.py"], restarts),
        ("launch_fairseq", ["fairseq-train", "data"], remote),
    ]


def test_what_takes_part_in_a_run_elsewhere_has_its_flags(called: Called, tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    token, tls = tmp_path / "token", tmp_path / "tls"
    both = ["--token-file", token, "--tls", tls]
    call("join", "a:1", *both, "--ranks-per-worker", 2, *SCRIPT)
    call("shard", "a:1", *both)
    call("worker", "--ranks-per-worker", "2,1", *SCRIPT)
    given = ["serve", "a:1", "--regions", 2, "--run-dir", tmp_path]
    call(*given, *both, "--resume", "--max-restarts", 0)
    call(*given, "--token-file", token, "--no-standby")
    assert called == [
        ("join", "a:1", ["python", "x.py"], token, tls, 2),
        ("hold", "a:1", token, tls),
        ("become_worker", ["python", "x.py"], "2,1"),
        ("serve", "a:1", 2, tmp_path, token, tls, True, True, 0),
        ("serve", "a:1", 2, tmp_path, token, None, False, False, 3),
    ]
