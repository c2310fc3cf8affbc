"""``python -m fairseq_async.fairseq_plugin.server``: the server of a fairseq run."""

from fairseq_async.fairseq_plugin.rule import build
from fairseq_async.server.process import serve

if __name__ == "__main__":
    serve(build)
