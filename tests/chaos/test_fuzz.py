"""A server that anybody may talk to stays up, remembers nothing of it, and changes nothing."""

import random
from pathlib import Path

import pytest

from tests.chaos.fuzz import Fuzzer, read_corpus
from tests.chaos.runs import Adder
from tests.servers import ThreadServer
from tests.test_faults import ServerClient


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_changes_nothing(tmp_path: Path, seed: int) -> None:
    server = ThreadServer(2, tmp_path, "127.0.0.2")
    try:
        adder = Adder(ServerClient(server.address, server.token, 0, 30.0))
        adder.step()
        fuzzer = Fuzzer(server, random.Random(seed), corpus=read_corpus())
        before = fuzzer.state()
        fuzzer.run(2.0)
        assert fuzzer.state() == before
        assert sum(fuzzer.tried.values()) > 100 and len(fuzzer.found) > 5
        assert adder.step()["version"] == 2
    finally:
        server.stop()


def test_what_was_once_found_is_refused_again(tmp_path: Path) -> None:
    server = ThreadServer(2, tmp_path, "127.0.0.2")
    try:
        adder = Adder(ServerClient(server.address, server.token, 0, 30.0))
        fuzzer = Fuzzer(server, random.Random(0))
        before = fuzzer.state()
        for data in read_corpus():
            with fuzzer._connect() as connection:
                fuzzer._send(connection, "stranger", data)
        assert fuzzer.state() == before and adder.step()["version"] == 1
    finally:
        server.stop()
