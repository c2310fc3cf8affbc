"""``python -m fairseq_async.launch.fairseq_server``: the server of a ``hybrid_async`` run in fairseq.

The ``__init__`` of fairseq imports all of its tasks, models and criterions, and the one of our plugin its trainers. The
server needs only optimizers and schedules. Its imports are to be fast: a run whose server died waits for them.
"""

import importlib.util
import os
import sys

from fairseq_async.environment import PLUGINS


def leave_out_inits(*packages: str) -> None:
    """Makes ``import`` skip the ``__init__`` of these packages; their modules can be imported as before.

    Hazard: names that an ``__init__`` defines do not exist in this process. The server does without, as it trains
    nothing.
    """
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is not None and name not in sys.modules:
            sys.modules[name] = importlib.util.module_from_spec(spec)


if __name__ == "__main__":
    if not os.environ.get(PLUGINS):  # a user's module may need any part of fairseq
        leave_out_inits("fairseq", "fairseq_async.fairseq_plugin")
        sys.modules.setdefault("deepspeed", None)  # type: ignore[arg-type]  # fairseq's optimizers do without it

    from fairseq_async.fairseq_plugin.server import build  # only after leave_out_inits
    from fairseq_async.server.programs.program import serve  # this too

    serve(build)
