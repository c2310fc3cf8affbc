"""Sets how many threads the server's passes over memory may use."""

import os
from collections.abc import Mapping

from fairseq_async.algorithms.threads import set_threads
from fairseq_async.method.spec import ServerSettings
from fairseq_async.server.membership import Membership
from fairseq_async.server.network.peers import Peer

_USEFUL = 4
"""Threads of one process that a pass gains from: on 16 cores eight were as slow as one (docs/results/gpu.md), probably
since each needs Python's interpreter lock between two short operations. Shards have a lock each."""


def use_idle_cores(peers: Mapping[int, Peer], membership: Membership, settings: ServerSettings) -> None:
    """Lets passes over memory use the cores of this machine on which no worker computes: all, when all workers wait."""
    computing = sum(not peers[worker].remote for worker in membership.computing & set(peers))
    idle = max(1, len(os.sched_getaffinity(0)) - computing)
    set_threads(min(idle, _USEFUL * settings.server_shards))
