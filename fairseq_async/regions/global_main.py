"""``python -m fairseq_async.regions.global_main``: the global server of several regions, of which each has a server."""

import argparse
import os

from fairseq_async.environment import TOKEN
from fairseq_async.protocol.notices import Tell
from fairseq_async.regions.global_service import GlobalService
from fairseq_async.server.plan import Build
from fairseq_async.server.programs.local_sgd_main import build
from fairseq_async.server.programs.program import serve


def global_service(options: argparse.Namespace, build: Build, tell: Tell) -> GlobalService:
    """Builds the service of a global server from its command line."""
    return GlobalService(os.environ[TOKEN], options.workers, options.run_dir, build, tell=tell)


if __name__ == "__main__":
    serve(build, make=global_service)
