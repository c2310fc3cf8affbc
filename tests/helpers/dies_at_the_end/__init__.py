"""A fairseq user directory: our plugin, and a worker 0 that is killed once before it writes its last checkpoint.

The environment variable ONCE names a file that is there when it has been killed.
"""

import os
import signal
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils

import fairseq_async.fairseq_plugin  # noqa: F401

_save = checkpoint_utils.save_checkpoint


def _save_or_die(args: Any, trainer: Any, epoch_itr: Any, val_loss: Any) -> Any:
    once = Path(os.environ["ONCE"])
    if trainer.session.context.worker == 0 and trainer.worker.finished and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return _save(args, trainer, epoch_itr, val_loss)


checkpoint_utils.save_checkpoint = _save_or_die
