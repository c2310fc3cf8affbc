"""Holds a shard of a run's server, for a server on another machine."""

import socket
from importlib import import_module
from pathlib import Path

from fairseq_async.errors import ConfigurationError, RefusedError
from fairseq_async.exchange.authentication import read_token
from fairseq_async.exchange.tls import server_context
from fairseq_async.launch.processes import interrupt_on_signals
from fairseq_async.options.addresses import is_loopback
from fairseq_async.options.validation import split_address
from fairseq_async.server.plan import Build
from fairseq_async.server.shards.host import ShardHost, hold_shard
from fairseq_async.worker.start.server_process import exposed, say

_BACKLOG = 128
# the programs of servers, and the modules with their ``build``: nothing else is imported because a server asks for it
_BUILDS = {
    "fairseq_async.launch.fairseq_server": "fairseq_async.fairseq_plugin.server",
    "fairseq_async.server.programs.gradient_main": "fairseq_async.server.programs.gradient_main",
    "fairseq_async.server.programs.local_sgd_main": "fairseq_async.server.programs.local_sgd_main",
    "fairseq_async.deepspeed_plugin.server": "fairseq_async.deepspeed_plugin.server",
}


def load_build(program: str) -> Build:
    """Returns the function that builds a server's rule.

    Raises:
        RefusedError: the program is none that has shards.
    """
    if program not in _BUILDS:
        raise RefusedError(f"{program}: not a server that has shards on other machines")
    build: Build = import_module(_BUILDS[program]).build
    return build


def hold(address: str, token_file: Path, tls: Path | None) -> None:
    """Waits for the run's server, and holds a shard of it until the run is finished.

    Args:
        address: HOST:PORT at which server and workers reach this process.

    Raises:
        ConfigurationError: the address, the token or the certificates cannot be used.
        KeyboardInterrupt: the process was interrupted.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ConfigurationError(f"{address}: {error}") from error
    token, encryption = read_token(token_file), None if tls is None else server_context(tls)
    interrupt_on_signals()
    try:
        listener = socket.create_server((host, port), backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"{address} cannot be used: {error}") from error
    with listener:
        if tls is None and not is_loopback(host):
            say(exposed(address))
        say(
            f"a shard waits at {host}:{listener.getsockname()[1]} for a server that has this address in --server-shards"
        )
        hold_shard(listener, ShardHost(token, load_build, say), encryption)
    say("the run is finished")
