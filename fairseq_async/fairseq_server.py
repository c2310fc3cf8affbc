"""``python -m fairseq_async.fairseq_server``: the server of a ``hybrid_async`` run in fairseq.

The ``__init__`` of fairseq imports every task, model and criterion that it has, and that of our plugin its trainers.
The server needs optimizers and schedules alone, and a run whose server died waits for its imports.
"""

import importlib.util
import os
import sys

from fairseq_async.environment import PLUGINS


def leave_out_inits(*packages: str) -> None:
    """Makes ``import`` skip the ``__init__`` of these packages, whose modules can be imported as before.

    Hazard: what an ``__init__`` defines is not there in this process, which trains nothing.
    """
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is not None and name not in sys.modules:
            sys.modules[name] = importlib.util.module_from_spec(spec)


if __name__ == "__main__":
    if not os.environ.get(PLUGINS):  # a user's module may import anything of fairseq
        leave_out_inits("fairseq", "fairseq_async.fairseq_plugin")
        sys.modules.setdefault("deepspeed", None)  # type: ignore[arg-type]  # fairseq's optimizers do without it

    from fairseq_async.fairseq_plugin.server import build  # after that
    from fairseq_async.server.program import serve  # after that, too

    serve(build)
