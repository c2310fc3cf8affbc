"""A server process whose connections are encrypted, and its launcher."""

import errno
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairseq_async.errors import ConfigurationError
from fairseq_async.exchange.authentication import new_token, write_token
from fairseq_async.exchange.tls import server_context
from fairseq_async.launch.certificates import make
from fairseq_async.server.network import connection_loop
from fairseq_async.server.network.connection_loop import ConnectionLoop
from fairseq_async.server.service import Service
from fairseq_async.worker.start.server_process import ServerProcess
from scripts.faults.sgd_server import build
from tests.helpers.commands import HELPERS, ROOT, Processes, command
from tests.helpers.documents import script_of_the_readme
from tests.helpers.run_files import events
from tests.helpers.server_client import SGD_SERVER, join, kill, pull, push


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make(directory, ["127.0.0.2"])
    return directory


@pytest.fixture
def start(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    started: list[ServerProcess] = []
    yield started
    for server in started:
        server.stop()


def test_a_server_that_is_started_again_is_encrypted_again(
    start: list[ServerProcess], certificates: Path, tmp_path: Path
) -> None:
    """Its worker finds it by itself."""
    log = tmp_path / "server.log"
    server = ServerProcess(SGD_SERVER, 1, tmp_path, log, host="127.0.0.2", restarts=1, tls=certificates)
    start.append(server)
    worker = join(server, 0, 30.0, certificates, workers=1, snapshot_seconds=1e-3)
    assert push(worker, 0, 0.5).version == 1
    kill(server)
    version, _ = pull(worker)
    push(worker, 1, 0.25, base=version)
    assert server.restarts == 0 and [event["sequence"] for event in events(tmp_path)][-1] == 1


def test_a_stranger_that_is_gone_again_before_its_handshake_holds_nobody_up(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reset(context: ssl.SSLContext, connection: socket.socket) -> socket.socket:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))

    pauses: list[float] = []
    monkeypatch.setattr("fairseq_async.exchange.tls.accepted", reset)
    monkeypatch.setattr(connection_loop.time, "sleep", pauses.append)
    service = Service("token", 1, tmp_path, build)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        loop = ConnectionLoop(listener, service, server_context(certificates))
        with socket.create_connection(listener.getsockname()) as stranger:
            loop.serve_once(10.0)
            stranger.settimeout(10)
            assert stranger.recv(1) == b"" and not loop.peers and not pauses


def test_a_server_that_others_can_reach_in_plain_text_says_so(
    start: list[ServerProcess], certificates: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = []
    for name, host, tls in (("a", "0.0.0.0", None), ("b", "0.0.0.0", certificates), ("c", "127.0.0.2", None)):
        start.append(ServerProcess(SGD_SERVER, 1, tmp_path / name, tmp_path / f"{name}.log", host=host, tls=tls))
        said.append(capfd.readouterr().err)
    assert said[0].startswith(f"fairseq-async: warning: other machines can reach {start[0].address}, and nothing")
    assert "--tls DIR" in said[0] and "SSH tunnel" in said[0] and said[0].count("\n") == 1
    assert "warning" not in said[1] + said[2]


def test_certificates_that_cannot_be_used_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--tls .*none: authority.pem cannot be read"):
        ServerProcess(SGD_SERVER, 1, tmp_path / "run", tmp_path / "log", tls=tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("by", ["launch", "script"])
def test_a_launched_script_is_encrypted_whoever_names_the_certificates(
    processes: Processes, certificates: Path, tmp_path: Path, by: str
) -> None:
    """Its workers reach the server, which listens at every address, on this machine."""
    write_token(tmp_path / "token", new_token())
    own = f", tls={str(certificates)!r}" if by == "script" else ""
    arguments = f"total_steps=200, run_dir={str(tmp_path / 'run')!r}{own}"
    script = script_of_the_readme().replace("total_steps=200", arguments)
    (tmp_path / "train.py").write_text(script.replace('"model.pt"', repr(str(tmp_path / "model.pt"))))
    ours = ["--workers", 2, "--host", "0.0.0.0", "--token-file", tmp_path / "token"]
    ours += ["--tls", certificates] if by == "launch" else []
    line = [command("fairseq-async"), "launch", *ours, "--", "python", tmp_path / "train.py"]
    code, said = processes.run(line, PYTHONPATH=f"{HELPERS / 'without_fairseq'}:{ROOT}")
    assert code == 0 and f"--tls {certificates} -- python" in said and "warning" not in said, said
    assert {event["worker"] for event in events(tmp_path / "run")} == {0, 1}
