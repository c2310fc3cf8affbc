"""Runs the global server of several regions; the regions' own servers are its workers."""

import shlex
import sys
from pathlib import Path

from fairseq_async.errors import ConfigurationError, ExchangeError
from fairseq_async.exchange.authentication import read_token
from fairseq_async.launch.interrupted import has_snapshot
from fairseq_async.launch.processes import interrupt_on_signals
from fairseq_async.options.validation import split_address
from fairseq_async.records.snapshots import DIRECTORY
from fairseq_async.worker.start.server_process import ServerProcess, manner, say

_SERVER = "fairseq_async.regions.global_main"


def serve(
    address: str,
    regions: int,
    run_dir: Path,
    token_file: Path,
    tls: Path | None,
    resume: bool,
    standby: bool = True,
    restarts: int = 0,
) -> None:
    """Runs the server until the run is finished, or all regions have left.

    Args:
        address: HOST:PORT at which the regions reach the server.
        regions: number of regions.
        resume: whether to go on from the last snapshot in the directory.
        standby: whether a second process waits to become the server.
        restarts: how often the server is started again at most.

    Raises:
        ConfigurationError: the address, the directory, the token or the certificates cannot be used.
        ExchangeError: the server has failed.
        KeyboardInterrupt: the server was interrupted; it has written a last snapshot.
    """
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ConfigurationError(f"{address}: {error}") from error
    token, log = read_token(token_file), run_dir / "logs" / "server.log"
    interrupt_on_signals()
    if resume and not has_snapshot(run_dir):
        say(f"--resume: no run was interrupted in {run_dir}; this one begins at its beginning")
    server = ServerProcess(
        _SERVER,
        regions,
        run_dir,
        log,
        port=port,
        host=host,
        token=token,
        restarts=restarts,
        ends_with_workers=True,
        resumes=resume,
        tls=tls,
        given=f"HOST:PORT {address}",
        standby=standby,
    )
    say(f"global server of regions 0 to {regions - 1}, which join with --upstream {server.address},region=N")
    try:
        server.join()
    except KeyboardInterrupt:
        server.end()
        say(_what_is_kept(run_dir, resume))
        raise
    finally:
        server.end()
    if server.poll() != 0:
        raise ExchangeError(f"the global server {manner(server.poll())}; log: {log}")


def _what_is_kept(run_dir: Path, resumes: bool) -> str:
    """Returns the message of an interrupted server, which has ended, with the command to go on with."""
    if not has_snapshot(run_dir):
        return "interrupted: there is no snapshot to go on from"
    line = ["fairseq-async", *sys.argv[1:], *([] if resumes else ["--resume"])]
    return f"interrupted: the last state is kept in {run_dir / DIRECTORY}; go on with: {shlex.join(line)}"
