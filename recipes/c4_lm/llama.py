"""Imports Llama from transformers, which imports torchaudio where it is installed, whether that can be loaded or not.

fairseq requires torchaudio, and pip brings the one for GPUs, which does not load beside a torch for CPUs.
"""

import sys

try:
    import torchaudio  # noqa: F401
except ImportError:
    pass
except OSError:
    sys.modules["torchaudio"] = None  # type: ignore[assignment]  # to transformers it is not installed then

from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["LlamaConfig", "LlamaForCausalLM"]
