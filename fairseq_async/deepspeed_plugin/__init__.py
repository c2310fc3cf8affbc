"""Asynchronous methods for DeepSpeed scripts: ``initialize`` in place of ``deepspeed.initialize``."""

from fairseq_async.deepspeed_plugin.initialize import initialize

__all__ = ["initialize"]
