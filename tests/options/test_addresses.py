"""Ports that a library must be told."""

import errno
import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from fairseq_async.options.addresses import ANY, LOOPBACK, free_port


@pytest.mark.parametrize("host", [LOOPBACK, ANY])
def test_nobody_else_gets_a_free_port_until_torchs_store_listens_at_it(host: str) -> None:
    port = free_port(host)
    with socket.socket() as other, pytest.raises(OSError) as error:
        other.bind((host, port))
    assert error.value.errno == errno.EADDRINUSE
    store = TCPStore(LOOPBACK, port, 1, is_master=True, timeout=timedelta(seconds=20))
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_no_port_is_free_twice() -> None:
    ports = [free_port() for _ in range(500)]  # of some 14,000: if none were kept, two would almost surely be equal
    assert len(set(ports)) == len(ports)
