"""``python -m fairseq_async.regions.global_main``: the global server of several regions, of which each has a server."""

import argparse
import os

import torch

from fairseq_async import protocol
from fairseq_async.environment import TOKEN
from fairseq_async.protocol import Answer
from fairseq_async.protocol.notices import Tell
from fairseq_async.server.network.connections import Peer
from fairseq_async.server.plan import Build
from fairseq_async.server.programs.local_sgd_main import build
from fairseq_async.server.programs.program import serve
from fairseq_async.server.resume import newest_state
from fairseq_async.server.service import Service


class GlobalService(Service):
    """Answers the servers of regions.

    Regions go on while no global server is there, and bring no parameters when it is back. So an interrupted run goes
    on from its snapshot as soon as any region says hello. It does not wait for region 0, as other servers wait for
    worker 0: that region may have left for good.

    As regions come back whenever their line does, a run whose regions are all away waits for them. It ends if a region
    has left for good, since those that are away may then have died: a server that waits for them would never end.
    """

    _says_alone = False  # whether the user was told that no region is there

    def is_deserted(self, now: float) -> bool:
        """Whether no region is there, at least one has left for good, and the others are away for their timeout."""
        alone = super().is_deserted(now)
        deserted = alone and bool(self.membership.left_for_good)
        if alone and not deserted and not self._says_alone:
            self.tell("no region is connected any more: the run waits until one is back, or until Ctrl-C")
        self._says_alone = alone
        return deserted

    def _hello(self, peer: Peer, hello: protocol.Hello) -> Answer | None:
        if self.run is None and self.resumes and self.snapshots.exist:
            run = self._describe(hello.spec, hello.layout, hello.gpu)
            source, state = newest_state(run, None, self.snapshots, resumes=True, tell=self.tell)
            if state is not None:
                self._begin(run, torch.zeros(run.layout.size, dtype=torch.float32, device="cpu"), state, source)
                self.membership.note_left(state.get("left", ()))
        return super()._hello(peer, hello)


def global_service(options: argparse.Namespace, build: Build, tell: Tell) -> GlobalService:
    """Builds the service of a global server from its command line."""
    return GlobalService(os.environ[TOKEN], options.workers, options.run_dir, build, tell=tell)


if __name__ == "__main__":
    serve(build, make=global_service)
