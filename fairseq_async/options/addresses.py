"""Internet addresses with a special meaning for server and workers, and free ports."""

import ipaddress
import socket

LOOPBACK = "127.0.0.1"  # this machine: worker and server that connect at this address share memory
ANY = "0.0.0.0"  # a server that listens there is reached at every address of its machine
IPV4_ONLY = "IPv6 addresses are not supported; give a name or an IPv4 address"
_held: list[socket.socket] = []  # to the end of this process


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
    """Returns a TCP port of ``host`` for a program that must be told one, such as torch's store at ``MASTER_PORT``.

    The port is this process's until it ends. A socket is bound to it and does not listen: the system gives the port to
    nobody who asks for any, while a program that names it, with SO_REUSEADDR as servers do, can listen on it. Were the
    socket closed, another process could get the port before the program listens, and the run would end with "address
    already in use".
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    _held.append(held)
    return int(held.getsockname()[1])
