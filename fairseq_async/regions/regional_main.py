"""``python -m fairseq_async.regions.regional_main``: a region's server of local SGD, a worker of the global server."""

import argparse
import os
import socket
from collections.abc import Callable

from fairseq_async.environment import TOKEN
from fairseq_async.method.global_server import UpstreamOption
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.notices import Tell
from fairseq_async.regions.regional_service import RegionalService
from fairseq_async.regions.upstream_link import UpstreamLink
from fairseq_async.server.plan import Build
from fairseq_async.server.programs.local_sgd_main import build
from fairseq_async.server.programs.program import serve


def regional_service(options: argparse.Namespace, build: Build, tell: Tell) -> RegionalService:
    """Builds the service of a region's server from its command line."""
    token = os.environ[TOKEN]
    with socket.socket(fileno=os.dup(options.listener)) as listener:
        port = listener.getsockname()[1]

    def connect(given: UpstreamOption, spec: MethodSpec, layout: Layout, on_news: Callable[[], object]) -> UpstreamLink:
        return UpstreamLink(given, spec, layout, token, options.tls, port, tell, on_news)

    return RegionalService(token, options.workers, options.run_dir, build, tell, connect)


if __name__ == "__main__":
    serve(build, make=regional_service)
