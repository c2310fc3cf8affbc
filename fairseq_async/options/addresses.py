"""Internet addresses with a special meaning for server and workers, and free ports."""

import ipaddress
import socket

LOOPBACK = "127.0.0.1"  # this machine: worker and server that connect at this address share memory
ANY = "0.0.0.0"  # a server that listens there is reached at every address of its machine


IPV4_ONLY = "IPv6 addresses are not supported; give a name or an IPv4 address"


def is_ipv6(host: str) -> bool:
    """Whether a host is an IPv6 address, with or without brackets: server and workers speak IPv4."""
    return ":" in host


def is_loopback(host: str) -> bool:
    """Whether an address cannot be reached from other machines."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
