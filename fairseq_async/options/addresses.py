"""Internet addresses with a special meaning for server and workers."""

import ipaddress

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
