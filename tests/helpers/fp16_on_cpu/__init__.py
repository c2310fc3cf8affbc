"""A fairseq user directory: our plugin, which takes ``--fp16`` with a synchronous method on a CPU, too.

It is refused there because fairseq needs a GPU for it; with ``--fp16-no-flatten-grads`` it needs none.
"""

from typing import Any

import fairseq_async.fairseq_plugin  # noqa: F401
from fairseq_async.fairseq_plugin import refused


def _check(args: Any, cfg: Any, legacy: bool) -> None:
    """Everything goes."""


refused.check_synchronous = _check
