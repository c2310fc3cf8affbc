"""Asynchronous methods for DeepSpeed scripts: ``initialize`` in place of ``deepspeed.initialize``.

``attach`` does the same for scripts in which ``transformers.Trainer`` or accelerate calls ``deepspeed.initialize``.
"""

from fairseq_async.deepspeed_plugin.initialize import initialize
from fairseq_async.pytorch.trainer.torchaudio import hide_broken_torchaudio

__all__ = ["attach", "initialize"]


def attach() -> None:
    """Makes ``transformers`` train asynchronously: see :func:`fairseq_async.deepspeed_plugin.huggingface.attach`."""
    hide_broken_torchaudio()
    # Reason: transformers and accelerate are needed by scripts that use them, and by nobody else.
    from fairseq_async.deepspeed_plugin import huggingface

    huggingface.attach()
