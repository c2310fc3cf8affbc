"""Internet addresses with a special meaning for server and workers."""

import ipaddress

LOOPBACK = "127.0.0.1"  # this machine: worker and server that connect at this address share memory
ANY = "0.0.0.0"  # a server that listens there is reached at every address of its machine


def is_loopback(host: str) -> bool:
    """Whether an address cannot be reached from other machines."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
