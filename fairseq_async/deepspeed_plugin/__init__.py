"""Asynchronous methods for DeepSpeed scripts: ``initialize`` in place of ``deepspeed.initialize``.

``attach`` does the same for scripts in which ``transformers.Trainer`` or accelerate calls ``deepspeed.initialize``.
"""

import sys

from fairseq_async.deepspeed_plugin.initialize import initialize

__all__ = ["attach", "initialize"]


def attach() -> None:
    """Makes ``transformers`` train asynchronously: see :func:`fairseq_async.deepspeed_plugin.huggingface.attach`."""
    _hide_broken_torchaudio()
    # Reason: transformers and accelerate are needed by scripts that use them, and by nobody else.
    from fairseq_async.deepspeed_plugin import huggingface

    huggingface.attach()


def _hide_broken_torchaudio() -> None:
    """Hides a torchaudio that was built for another torch: transformers would import it, and fail with it."""
    # Reason: the import is the only test of whether torchaudio's library can be loaded.
    try:
        import torchaudio  # noqa: F401
    except ImportError:
        pass
    except OSError:
        sys.modules["torchaudio"] = None  # type: ignore[assignment]  # to transformers it is not installed then
