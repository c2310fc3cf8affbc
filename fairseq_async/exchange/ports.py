"""TCP ports for processes that are started on this machine."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a TCP port of ``host`` that nobody listens on now.

    The port is only found, not kept: the socket is closed before the caller's process listens. Another process can
    take the port in between; whoever listens then fails with "address already in use", and the run has to be started
    again. Use it only where a library wants a port's number (``MASTER_PORT`` of torch.distributed); a server of ours
    hands its listening socket on and has no such gap.
    """
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
