"""Internet addresses of one machine and of others."""

import ipaddress

LOOPBACK = "127.0.0.1"  # this machine: what is at this address shares memory
ANY = "0.0.0.0"  # a server that listens there is reached at every address of its machine


def is_loopback(host: str) -> bool:
    """Whether nobody on another machine can reach this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
