"""A cable between two network namespaces that is long, thin and loses packets, in user space: it needs no netem.

    python -m scripts.faults.wire NETNS ADDRESS NETNS ADDRESS --seconds 0.1 --loss 0.01 --bytes-per-second 1.25e6

Each end is a TUN device of its namespace ("-" for this process's own); the packets that the kernel writes to one are
handed to the other after the delay, in their order, as fast as the rate allows, but for those that are lost. Prints
"up", and ends with its input.
"""

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

OWN = "-"
_TUNSETIFF, _TUN, _NO_INFORMATION = 0x400454CA, 0x0001, 0x1000
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_LARGEST = 2048  # bytes of a packet
_QUEUE = 0.5  # seconds of packets that wait for the rate; further ones are dropped, as by a router


def open_end(namespace: str, address: str) -> int:
    """Opens a TUN device in the namespace, sets it up, and returns its file descriptor."""
    home, name = os.open("/proc/self/ns/net", os.O_RDONLY), f"wire{os.getpid()}"
    try:
        if namespace != OWN:
            _enter(os.open(Path("/var/run/netns") / namespace, os.O_RDONLY))
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_INFORMATION))
    finally:
        _enter(home)
    where = [] if namespace == OWN else ["-n", namespace]
    for command in (["addr", "add", f"{address}/24", "dev", name], ["link", "set", name, "up"]):
        subprocess.run(["ip", *where, *command], check=True)
    return device


def _enter(namespace: int) -> None:
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(namespace)


class Direction:
    """The packets that travel from one end to the other."""

    def __init__(self, source: int, target: int, seconds: float, loss: float, rate: float, seed: int) -> None:
        self.source, self.target, self.seconds, self.loss, self.rate = source, target, seconds, loss, rate
        self.chance = random.Random(seed)
        self.free_at = 0.0  # when the rate allows another packet
        self.waiting: list[tuple[float, int, bytes]] = []
        self.count = self.lost = 0

    def read(self, now: float) -> None:
        packet = os.read(self.source, _LARGEST)
        self.count += 1
        self.free_at = max(now, self.free_at)
        if self.chance.random() < self.loss or self.free_at > now + _QUEUE:
            self.lost += 1
            return
        self.free_at += len(packet) / self.rate
        heapq.heappush(self.waiting, (self.free_at + self.seconds, self.count, packet))

    def write(self, now: float) -> None:
        while self.waiting and self.waiting[0][0] <= now:
            try:
                os.write(self.target, heapq.heappop(self.waiting)[2])
            except OSError:
                self.lost += 1  # the other end accepts none now


def carry(directions: list[Direction], until: int) -> None:
    """Carries packets until the file ``until`` can be read."""
    by_source = {direction.source: direction for direction in directions}
    while True:
        due = min((d.waiting[0][0] for d in directions if d.waiting), default=time.monotonic() + 1)
        ready, _, _ = select.select([*by_source, until], [], [], max(0.0, due - time.monotonic()))
        if until in ready:
            return
        for source in ready:
            by_source[source].read(time.monotonic())
        for direction in directions:
            direction.write(time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ends", nargs=4, metavar="NAMESPACE ADDRESS")
    parser.add_argument("--seconds", type=float, default=0.0, help="from one end to the other")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets")
    parser.add_argument("--bytes-per-second", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    one, other = (open_end(*args.ends[place : place + 2]) for place in (0, 2))
    how = args.seconds, args.loss, args.bytes_per_second
    directions = [Direction(one, other, *how, args.seed), Direction(other, one, *how, args.seed + 1)]
    print("up", flush=True)
    carry(directions, sys.stdin.fileno())
    print("packets", *(f"{each.count} lost {each.lost}" for each in directions), flush=True)


if __name__ == "__main__":
    main()
