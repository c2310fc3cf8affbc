"""Sets how many threads the server's passes over memory may use."""

import os
from collections.abc import Mapping

from fairseq_async.algorithms.threads import set_threads
from fairseq_async.server.membership import Membership
from fairseq_async.server.network.peers import Peer


def use_idle_cores(peers: Mapping[int, Peer], membership: Membership, threads: int | None) -> None:
    """Lets passes over memory use the cores of this machine on which no worker computes: all, when all workers wait.

    Args:
        threads: number of threads that the user asked for instead; None for the idle cores.
    """
    computing = sum(not peers[worker].remote for worker in membership.computing & set(peers))
    set_threads(threads or max(1, len(os.sched_getaffinity(0)) - computing))
