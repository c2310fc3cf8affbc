"""The store of torchrun or deepspeed, through which the ranks of a job tell each other small values."""

import json
import os
import socket
from datetime import timedelta
from typing import Any

from pydantic import JsonValue
from torch.distributed import TCPStore

from fairseq_async.errors import ConfigurationError, ExchangeError

PATIENCE = timedelta(seconds=120)  # for a value: worker 0 has to import its framework and to start the server
STARTED_AGAIN = "TORCHELASTIC_RESTART_COUNT"  # torchrun's: how often it has started all ranks again


def may_start_again() -> bool:
    """Whether torchrun starts all ranks again if one of them dies."""
    get = os.environ.get
    return int(get("TORCHELASTIC_MAX_RESTARTS") or 0) > int(get(STARTED_AGAIN) or 0)


def open_store(rank: int) -> TCPStore:
    """Connects to torchrun's store, or, where the launcher hosts none, to one that the first rank hosts.

    Args:
        rank: of this process among the ranks of all workers.

    Raises:
        ConfigurationError: another job uses its port.
        ExchangeError: no process hosts the store.
    """
    if not _kept:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        first = rank == 0 and not agent
        if first:
            _check_free(port)
        try:
            store = TCPStore(host, port, is_master=first, wait_for_workers=False, timeout=PATIENCE)
        except RuntimeError as error:
            raise ExchangeError(f"rank 0 does not answer at {host}:{port} (MASTER_ADDR, MASTER_PORT)") from error
        if store.add(_key(f"rank-{rank}"), 1) > 1:  # without this, a rank would join another job's run
            raise _taken(port)
        _kept.append(store)
    return _kept[0]


def tell(rank: int, name: str, value: JsonValue) -> None:
    """Stores a value for the other ranks; raises as :func:`open_store`."""
    open_store(rank).set(_key(name), json.dumps(value))


def ask(rank: int, name: str, otherwise: str) -> Any:
    """Waits for the value that another rank stores under this name; raises as :func:`open_store`.

    Raises:
        ExchangeError: it did not come; ``otherwise`` is the message.
    """
    store = open_store(rank)
    try:
        return json.loads(store.get(_key(name)))
    except RuntimeError as error:
        raise ExchangeError(otherwise) from error


def _check_free(port: int) -> None:
    """Raises an error for a port that is taken before torch does, whose message has thirty lines."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise _taken(port) from error


def _taken(port: int) -> ConfigurationError:
    return ConfigurationError(f"port {port} (MASTER_PORT) is another job's: give this job a master_port of its own")


_kept: list[TCPStore] = []  # the store that the first rank hosts must live until the others have read it


def _key(name: str) -> str:
    return f"fairseq_async/{os.environ.get(STARTED_AGAIN, '0')}/{name}"
