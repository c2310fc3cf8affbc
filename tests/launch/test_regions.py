"""``fairseq-async serve`` and regions under it: real processes, of which two servers die."""

import os
import secrets
import signal
import socket
from pathlib import Path
from subprocess import Popen

import pytest

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.serve import serve
from fairseq_async.options.addresses import free_port
from fairseq_async.records.description import RunDescription
from fairseq_async.reporting.audit import audit
from tests.helpers.commands import HELPERS, Processes, command
from tests.helpers.launched import count, find
from tests.helpers.run_files import events
from tests.helpers.waiting import wait_until


def test_a_region_and_the_global_server_die_and_come_back_and_all_is_trained(
    processes: Processes, tmp_path: Path
) -> None:
    above, token, port = tmp_path / "global", tmp_path / "token", free_port()
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    where = f"127.0.0.1:{port}"
    line = [command("fairseq-async"), "serve", where, "--regions", 2, "--run-dir", above, "--token-file", token]
    started = [processes.start(line)]
    started += [
        _launch(processes, tmp_path / f"region{region}", token, f"{where},region={region}") for region in (0, 1)
    ]
    wait_until(lambda: count(above, 0) > 2 and count(above, 1) > 2, 120)
    (server,) = find(tmp_path / "region1", "regional_main")
    os.kill(server, signal.SIGKILL)
    before = count(above, 1)
    wait_until(lambda: count(above, 1) > before + 2, 60)
    (server,) = find(above, "global_main")
    os.kill(server, signal.SIGKILL)
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert all("was killed by SIGKILL, and was started again from version-" in said[each] for each in (0, 2)), said
    found = [audit(folder) for folder in (above, tmp_path / "region0", tmp_path / "region1")]
    assert [len(each.rollbacks) for each in found] == [1, 0, 1]
    assert any(event.get("merged") for event in events(tmp_path / "region1"))
    assert sum(event["local_steps"] for event in events(tmp_path / "region0")) >= 200
    assert RunDescription.read(above).spec.of_regions and "fairseq-async export" in said[0]
    assert list((above / "snapshots").glob("version-*.pt"))


def test_a_global_server_that_is_interrupted_or_killed_says_what_there_is_to_go_on_from(
    processes: Processes, tmp_path: Path
) -> None:
    run_dir, token = tmp_path / "global", tmp_path / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    line = ["serve", f"127.0.0.1:{free_port()}", "--regions", 2, "--run-dir", run_dir, "--token-file", token]
    for resumes, kept in ((True, False), (False, True)):
        server = processes.start([command("fairseq-async"), *line, *["--resume"] * resumes])
        log = run_dir / "logs" / "server.log"
        wait_until(lambda log=log: log.exists() and "listens" in log.read_text(), 60)  # type: ignore[misc]
        log.unlink()
        if kept:
            (run_dir / "snapshots").mkdir()
            (run_dir / "snapshots" / "version-000000000007.pt").touch()
        server.terminate()
        said, _ = server.communicate(timeout=60)
        assert server.returncode == 130 and ("--resume: no run was interrupted in" in said) == resumes, said
        again = f"; go on with: fairseq-async {' '.join(map(str, line))} --resume\n"
        assert (again in said) == kept and ("there is no snapshot to go on from" in said) != kept, said
    server = processes.start([command("fairseq-async"), *line, "--max-restarts", 0])
    wait_until(lambda: log.exists() and "listens" in log.read_text(), 60)
    (killed,) = find(run_dir, "global_main")
    os.kill(killed, signal.SIGKILL)
    said, _ = server.communicate(timeout=60)
    assert server.returncode and "the global server was killed by SIGKILL" in said and "again" not in said, said


def test_an_address_that_is_taken_is_named_as_it_was_given(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"^HOST:PORT {address} cannot be used: "):
            serve(address, 2, tmp_path / "run", token, None, False)


def _launch(processes: Processes, run_dir: Path, token: Path, upstream: str) -> "Popen[str]":
    job = ["python", HELPERS / "region_job.py", run_dir, token, f"{upstream},updates=4,delay=2,outer_lr=0.5", 200]
    return processes.start([command("fairseq-async"), "launch", "--workers", 1, "--token-file", token, "--", *job])
