"""The file by which the workers of a job find their server."""

import socket
from functools import partial
from pathlib import Path

import pytest

from fairseq_async.errors import ConfigurationError, ExchangeError
from fairseq_async.worker.start.invitation import invitation
from fairseq_async.worker.start.meeting import Meeting, MeetingPlace, wait_until_it_listens
from tests.helpers.stand_ins import Time


def place(address: str, machine: str = "elsewhere", near: str = "127.0.0.1:1") -> MeetingPlace:
    return MeetingPlace("srun 7", machine, address, near, token="a secret of this run")


def test_the_file_is_its_owners_alone_and_of_one_job(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, "srun 7")
    assert meeting.place() is None
    meeting.tell(place("node1:29400"))
    assert meeting.place() == place("node1:29400") and place("node1:29400").port == 29400
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]
    assert Meeting(tmp_path, "srun 8").place() is None


def test_a_file_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, "srun 7")
    meeting.tell(place("node1:29400"))
    meeting.path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="others can read it, and it has the run's secret; remove it"):
        meeting.place()
    meeting.path.chmod(0o600)
    for text in ("no JSON", "{}", "[]", "7"):
        meeting.path.write_text(text)
        with pytest.raises(ConfigurationError, match="does not say where the server is; remove it"):
            meeting.place()


def test_a_worker_waits_for_a_server_that_listens(tmp_path: Path) -> None:
    """The file of a server that is no more is not enough."""
    meeting = Meeting(tmp_path, "srun 7")
    with socket.socket() as silent:
        silent.bind(("127.0.0.2", 0))
        address = "{}:{}".format(*silent.getsockname())
        meeting.tell(place(address))
        with pytest.raises(ExchangeError, match="worker 0 has started no server within 0.2 s; .*server.json would say"):
            meeting.wait(0.2)
        with pytest.raises(ExchangeError, match=rf"no server at {address} \(--server\) within 0.2 s"):
            wait_until_it_listens(address, 0.2)
        silent.listen()
        assert meeting.wait(10) == (address, "a secret of this run")
        wait_until_it_listens(address, 10)


def test_a_server_is_looked_for_twice_a_second_until_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt takes five seconds at most: a machine that is off answers nothing."""
    time, tried = Time(), list[tuple[tuple[str, int], float]]()

    def connect(address: tuple[str, int], timeout: float) -> None:
        tried.append((address, timeout))
        raise OSError

    monkeypatch.setattr("fairseq_async.worker.start.meeting.time", time)
    monkeypatch.setattr(socket, "create_connection", connect)
    at = Meeting(tmp_path, "srun 7")
    at.tell(place("node1:29400"))
    for wait in (at.wait, partial(wait_until_it_listens, "node1:29400")):
        began = time.now
        with pytest.raises(ExchangeError, match="within 3 s"):
            wait(3.0)
        assert 3.0 <= time.now - began <= 3.5 and set(time.pauses) == {0.5}
    assert set(tried) == {(("node1", 29400), 5.0)}


def test_a_worker_on_the_servers_machine_takes_the_near_address_if_it_is_the_machine(tmp_path: Path) -> None:
    """Containers on different machines may have the same name."""
    meeting = Meeting(tmp_path, "srun 7")
    with socket.create_server(("127.0.0.2", 0)) as far, socket.create_server(("127.0.0.1", 0)) as near:
        addresses = ["{}:{}".format(*each.getsockname()) for each in (far, near)]
        meeting.tell(place(addresses[0], socket.gethostname(), addresses[1]))
        assert meeting.wait(10)[0] == addresses[1]
        near.close()
        assert meeting.wait(10)[0] == addresses[0]


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", socket.gethostname()), ("10.0.0.1", "10.0.0.1")])
def test_an_invitation_names_an_address_that_other_machines_can_reach(host: str, reached: str) -> None:
    assert invitation(f"{host}:5000", Path("token"), ["train.py"]).startswith(f"server at {reached}:5000; ")
