"""``fairseq-async certificates``."""

import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509

from fairseq_async import cli
from fairseq_async.errors import ConfigurationError
from fairseq_async.exchange import tls
from fairseq_async.launch.certificates import make
from fairseq_async.worker.start.server_process import _listen


def names(directory: Path) -> set[str]:
    """Of the hosts that the server's certificate is for."""
    certificate = x509.load_pem_x509_certificate((directory / "server.pem").read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(each.value) for each in found}


def test_the_command_writes_what_both_sides_need_with_keys_that_nobody_else_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "certificates"
    directory.mkdir(mode=0o700)
    (directory / "server.key").write_text("one that others could read")
    monkeypatch.setattr(sys, "argv", ["fairseq-async", "certificates", str(directory), "node1", "10.0.0.1"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0 and "authority.key makes more certificates" in capsys.readouterr().out
    keys = sorted(directory.glob("*.key"))
    assert [key.name for key in keys] == ["authority.key", "server.key", "worker.key"]
    assert {key.stat().st_mode & 0o777 for key in keys} == {0o600} and directory.stat().st_mode & 0o777 == 0o700
    assert names(directory) == {"node1", "10.0.0.1", "127.0.0.1", "localhost"}
    tls.server_context(directory)
    tls.worker_context(directory)
    days = dict[str, int]()
    for path in directory.glob("*.pem"):
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        assert datetime.now(timezone.utc) - begins > timedelta(minutes=59), "another machine's clock may be behind"
        assert path.stat().st_mode & 0o777 == 0o644
        days[path.stem] = (ends - begins).days
    assert days == {"authority": 3650, "server": 365, "worker": 365}


def test_a_second_call_keeps_the_authority_so_that_what_was_copied_stays_good(tmp_path: Path) -> None:
    make(tmp_path, ["node1"])
    authority, worker = ((tmp_path / name).read_bytes() for name in ("authority.pem", "worker.pem"))
    make(tmp_path, ["node2"])
    assert (tmp_path / "authority.pem").read_bytes() == authority
    assert (tmp_path / "worker.pem").read_bytes() != worker and "node2" in names(tmp_path)


@pytest.mark.parametrize("host", ["", "no de", "-x", "a/b", "10.0.0.1:29400", ".".join(["a" * 50] * 5)])
def test_a_host_that_is_none_is_named_and_nothing_written(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^HOST {host}: neither a name of a machine nor an address"):
        make(tmp_path / "new", ["node1", host])
    assert not (tmp_path / "new").exists()


def test_an_address_at_which_no_server_can_listen_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="^HOST ::1: servers listen at IPv4 addresses alone"):
        make(tmp_path / "new", ["node1", "::1"])
    with pytest.raises(ConfigurationError, match="--server ::1:0 cannot be used"):
        _listen("::1", 0)


def test_an_authority_without_its_key_is_not_replaced(tmp_path: Path) -> None:
    make(tmp_path, ["node1"])
    before = (tmp_path / "authority.pem").read_bytes()
    (tmp_path / "authority.key").unlink()
    with pytest.raises(ConfigurationError, match="an authority without a key that can be read"):
        make(tmp_path, ["node1"])
    assert (tmp_path / "authority.pem").read_bytes() == before
