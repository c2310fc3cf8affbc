"""Encrypted connections: what arrives, who is refused, and whom that holds up."""

import shutil
import socket
import ssl
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fairseq_async.errors import ConfigurationError, ExchangeError, RefusedError
from fairseq_async.exchange import Channel, tls
from fairseq_async.launch.certificates import make
from fairseq_async.server.network import connection_loop
from fairseq_async.worker.connection.client import Client
from fairseq_async.worker.connection.lasting_connection import LastingConnection
from scripts.faults.thread_server import ThreadServer
from tests.helpers.server_client import join, pull, push
from tests.helpers.waiting import wait_until

HOST = "127.0.0.2"  # tensors go through the connection


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ours")
    make(directory, [HOST])
    return directory


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of another authority."""
    directory = tmp_path_factory.mktemp("others")
    make(directory, [HOST])
    return directory


@pytest.fixture
def server(tmp_path: Path, ours: Path) -> Iterator[ThreadServer]:
    with ThreadServer(2, tmp_path, HOST, tls=ours) as server:
        yield server


def mixed(directory: Path, *parts: tuple[Path, str, str]) -> Path:
    """A directory with files of several: from where, under which name, and their name here."""
    directory.mkdir()
    for source, name, here in parts:
        for suffix in ("pem", "key"):
            shutil.copy(source / f"{name}.{suffix}", directory / f"{here}.{suffix}")
    return directory


def address_of(server: ThreadServer) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


def refused(server: ThreadServer) -> int:
    return server.service.refusals.counts["TLS"]


# What arrives


def test_updates_and_parameters_arrive_as_they_do_in_plain_text(server: ThreadServer, ours: Path) -> None:
    with closing(join(server, 0, tls=ours)) as first, closing(join(server, 1, tls=ours)) as second:
        assert push(first, 0, 0.5).version == 1
        assert push(second, 0, 0.25).staleness == 1
        assert pull(first) == pull(second) == (2, 0.25)
        connection = first.connection.channel.connection
        assert isinstance(connection, ssl.SSLSocket) and connection.version() == "TLSv1.3"


@pytest.fixture
def pair(ours: Path) -> Iterator[tuple[Channel, Channel]]:
    """A worker's channel and a server's."""
    with socket.create_server((HOST, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = tls.accepted(tls.server_context(ours), listener.accept()[0])
    with ThreadPoolExecutor(1) as pool:
        connected = pool.submit(tls.connected, tls.worker_context(ours), near, f"{HOST}:1")
        wait_until(lambda: tls.handshake(far))
        worker, server = Channel(connected.result(10)), Channel(far)
    yield worker, server
    worker.close()
    server.close()


def test_a_tensor_that_fills_every_buffer_arrives_whole_in_both_directions(pair: tuple[Channel, Channel]) -> None:
    """The server's side never waits: it reads and writes what the connection has and takes."""
    worker, server = pair
    update = torch.arange(3_000_000.0)
    server.room, worker.room = torch.zeros_like(update), torch.zeros_like(update)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(worker.send, b"update", update)
        got: list[bytes] = []
        wait_until(lambda: bool(got.extend(server.messages()) or got))
        sent.result(10)
        server.queue(b"answer", update)
        server.queue(b"small")
        flushed = [server.flush()]
        received = pool.submit(lambda: [worker.receive(), worker.receive()])
        wait_until(lambda: bool(flushed.append(server.flush()) or flushed[-1]))
        assert received.result(10) == [b"answer", b"small"]
    assert got == [b"update"] and server.room.equal(update) and worker.room.equal(update)
    assert not flushed[0], "it was too small to fill the buffers"


def test_a_message_in_the_same_record_as_the_end_of_a_tensor_is_not_forgotten(pair: tuple[Channel, Channel]) -> None:
    """No selector tells of it: it has been received and decrypted."""
    worker, server = pair
    server.room = torch.zeros(3)
    frame = struct.Struct("!IQ").pack
    worker.connection.sendall(frame(1, 12) + b"a")
    wait_until(lambda: server.messages() == [] and server._stream.missing.nbytes == 12)
    worker.connection.sendall(torch.ones(3).numpy().tobytes() + frame(1, 0) + b"b")
    got: list[bytes] = []
    wait_until(lambda: bool(got.extend(server.messages()) or got))
    assert got == [b"a"] and server.has_message and server.messages() == [b"b"]


def test_a_peer_that_ends_amid_a_tensor_has_closed_the_connection(pair: tuple[Channel, Channel]) -> None:
    worker, server = pair
    server.room = torch.zeros(100)
    worker.connection.sendall(struct.pack("!IQ", 1, 400) + b"a" + bytes(100))
    wait_until(lambda: server.messages() == [] and server._stream.missing.nbytes == 300)
    worker.end()
    with pytest.raises(ExchangeError, match="closed"):
        wait_until(server.messages)


def test_a_side_that_waits_for_messages_waits_as_before_after_a_look_at_what_is_there(
    pair: tuple[Channel, Channel],
) -> None:
    for channel in pair:
        channel.connection.settimeout(7.0)
        assert channel.messages() == [] and channel.connection.gettimeout() == 7.0
    for channel in pair:
        channel.queue(b"small")
        assert channel.flush() and channel.connection.gettimeout() == 7.0


def test_a_connection_that_has_ended_never_goes_on_in_plain_text(pair: tuple[Channel, Channel]) -> None:
    worker, server = pair
    server.end()
    with pytest.raises(ExchangeError, match="closed"):
        server.send(b"secret")
    with pytest.raises(ExchangeError, match="closed"):
        worker.receive()


# Who is refused


def test_who_has_another_authority_is_refused_on_both_sides(
    server: ThreadServer, ours: Path, others: Path, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError, match=f"certificate of the server at {server.address} is refused: .*certificate"):
        Client(LastingConnection(server.address, server.token, 0, tls=others))
    wait_until(lambda: refused(server) == 1)  # which the worker has told it
    half = mixed(tmp_path / "half", (ours, "authority", "authority"), (others, "worker", "worker"))
    with pytest.raises(RefusedError, match="refuses this worker's certificate: unknown ca") as caught:
        Client(LastingConnection(server.address, server.token, 0, tls=half))
    assert "\n" not in str(caught.value)
    wait_until(lambda: refused(server) == 2)  # the worker hears of it before the server counts it
    with closing(join(server, 0, tls=ours)) as client:
        assert client.worker == 0


def test_who_has_no_certificate_is_refused(server: ThreadServer, ours: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ours / "authority.pem")
    plain = socket.create_connection(address_of(server), timeout=10)
    with context.wrap_socket(plain, server_hostname=HOST) as connection:
        with pytest.raises(ssl.SSLError, match="(?i)certificate.required"):
            connection.recv(1)
    wait_until(lambda: refused(server) == 1)  # it hears of it before the server counts it


def test_who_speaks_plain_text_is_refused(
    server: ThreadServer, ours: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(address_of(server), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        while connection.recv(100):
            pass
    wait_until(lambda: refused(server) == 1)
    assert "refused (TLS, 1 so far): a stranger: http request" in capfd.readouterr().err
    monkeypatch.setattr(connection_loop, "_HANDSHAKE_SECONDS", 0.2)
    with pytest.raises(ExchangeError, match=f"the server at {server.address} says nothing; does it need --tls?"):
        Client(LastingConnection(server.address, server.token, 0))
    assert server.service.refusals.counts["no introduction"] == 1


@pytest.mark.parametrize("error", [ssl.SSLEOFError, ssl.SSLZeroReturnError])
def test_a_peer_that_has_gone_amid_the_handshake_has_made_no_mistake(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch, error: type[ssl.SSLError]
) -> None:
    """It may be a server that is started again: the worker is to try once more."""

    def closed(*_: object, **__: object) -> None:
        handshakes.append(True)
        raise error

    handshakes = list[bool]()
    context = SimpleNamespace(wrap_socket=closed)
    with socket.socket() as connection, pytest.raises(ExchangeError, match="a:1 closed the connection"):
        tls.connected(context, connection, "a:1")  # type: ignore[arg-type]
    monkeypatch.setattr(tls, "handshake", closed)
    with socket.create_connection(address_of(server)) as stranger:
        stranger.sendall(b"hello")
        assert stranger.recv(1) == b"" and len(handshakes) == 2
    assert not server.service.refusals.counts


def test_who_only_asks_whether_somebody_listens_is_not_counted(server: ThreadServer, ours: Path) -> None:
    """As ``fairseq-async join`` does before it imports anything."""
    for _ in range(3):
        socket.create_connection(address_of(server)).close()
    with closing(join(server, 0, tls=ours)) as client:
        assert client.worker == 0
    assert sum(server.service.refusals.counts.values()) == 0


def test_a_server_without_tls_is_refused(tmp_path: Path, ours: Path) -> None:
    server = ThreadServer(1, tmp_path, HOST)
    with pytest.raises(RefusedError, match=rf"{server.address} does not speak TLS 1.3 \(.*\): start it with --tls too"):
        Client(LastingConnection(server.address, server.token, 0, tls=ours))
    server.stop()


def test_certificates_that_have_expired_are_refused_on_both_sides(
    server: ThreadServer, ours: Path, tmp_path: Path
) -> None:
    expired = mixed(tmp_path / "expired", (ours, "authority", "authority"))
    make(expired, [HOST], days=-1)
    old = ThreadServer(1, tmp_path / "run", HOST, tls=expired)
    with pytest.raises(RefusedError, match=f"is refused: certificate has expired; make it with: .* DIR {HOST}"):
        Client(LastingConnection(old.address, old.token, 0, tls=ours))
    old.stop()
    with pytest.raises(RefusedError, match="refuses this worker's certificate: certificate expired"):
        Client(LastingConnection(server.address, server.token, 0, tls=expired))


def test_a_certificate_of_another_host_is_refused(tmp_path: Path, ours: Path) -> None:
    server = ThreadServer(1, tmp_path, "127.0.0.3", tls=ours)
    with pytest.raises(RefusedError, match="is refused: .*not valid for '127.0.0.3'; make it with: .* DIR 127.0.0.3"):
        Client(LastingConnection(server.address, server.token, 0, tls=ours))
    server.stop()


def test_a_workers_certificate_makes_no_server(tmp_path: Path, ours: Path) -> None:
    pretended = mixed(tmp_path / "pretended", (ours, "authority", "authority"), (ours, "worker", "server"))
    server = ThreadServer(1, tmp_path / "run", HOST, tls=pretended)
    with pytest.raises(RefusedError, match="is refused: .*purpose"):
        Client(LastingConnection(server.address, server.token, 0, tls=ours))
    server.stop()


# Whom that holds up


def test_a_handshake_that_comes_byte_by_byte_holds_nobody_up(server: ThreadServer, ours: Path) -> None:
    """Others hang in the middle of theirs; the slow one comes in at last."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    slow = tls.worker_context(ours).wrap_bio(incoming, outgoing, server_hostname=HOST)
    with pytest.raises(ssl.SSLWantReadError):
        slow.do_handshake()
    hello = outgoing.read()
    with ExitStack() as crowd:
        honest = crowd.enter_context(closing(join(server, 0, tls=ours)))
        hanging = [crowd.enter_context(socket.create_connection(address_of(server))) for _ in range(20)]
        for each in hanging:
            each.sendall(hello[:50])
        dribbling = crowd.enter_context(socket.create_connection(address_of(server), timeout=10))
        for index, byte in enumerate(hello):
            dribbling.sendall(bytes([byte]))
            if index % 50 == 0:
                assert push(honest, index // 50, 0.5, base=index // 50).version == index // 50 + 1
        finished = False
        while not finished:
            incoming.write(dribbling.recv(1 << 16))
            try:
                slow.do_handshake()
                finished = True
            except ssl.SSLWantReadError:
                pass
        dribbling.sendall(outgoing.read())
        incoming.write(dribbling.recv(1 << 16))
        assert b'"kind":"greeting"' in slow.read(1000).replace(b" ", b"")
    assert refused(server) == 0


# Files


def test_a_private_key_that_others_can_read_is_refused(tmp_path: Path, ours: Path) -> None:
    copied = mixed(tmp_path / "copied", *[(ours, name, name) for name in ("authority", "server", "worker")])
    tls.server_context(copied)
    said = r"--tls .*: others can read server.key; run chmod 600 .*server.key"
    for mode in (0o640, 0o604, 0o620):
        (copied / "server.key").chmod(mode)
        with pytest.raises(ConfigurationError, match=said):
            tls.server_context(copied)
    tls.worker_context(copied)


def test_both_sides_speak_tls_1_3_alone_and_ask_the_other_for_a_certificate(ours: Path) -> None:
    contexts = tls.server_context(ours), tls.worker_context(ours)
    assert [(each.minimum_version, each.verify_mode, each.check_hostname) for each in contexts] == [
        (ssl.TLSVersion.TLSv1_3, ssl.CERT_REQUIRED, False), (ssl.TLSVersion.TLSv1_3, ssl.CERT_REQUIRED, True)
    ]  # fmt: skip
    assert contexts[0].num_tickets == 0, "they would arrive behind the answer that a worker waits for"


@pytest.mark.parametrize("name", ["authority.pem", "worker.pem", "worker.key"])
def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path, ours: Path, name: str) -> None:
    copied = mixed(tmp_path / "copied", *[(ours, each, each) for each in ("authority", "worker")])
    (copied / name).write_text("no certificate")
    with pytest.raises(
        ConfigurationError, match=r"--tls .*: authority.pem, worker.pem or worker.key is no certificate"
    ):
        tls.worker_context(copied)
    (copied / name).unlink()
    with pytest.raises(ConfigurationError, match=rf"--tls .*: {name} cannot be read \(No such file"):
        tls.worker_context(copied)
