"""Imports Llama from transformers, also where torchaudio is installed but cannot be loaded.

transformers imports torchaudio where it is installed. fairseq requires torchaudio, and pip installs the build for GPUs,
which does not load beside a torch for CPUs.
"""

import sys

try:
    import torchaudio  # noqa: F401
except ImportError:
    pass
except OSError:
    sys.modules["torchaudio"] = None  # type: ignore[assignment]  # transformers then treats it as not installed

from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["LlamaConfig", "LlamaForCausalLM"]
