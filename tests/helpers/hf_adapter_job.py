"""The recipe for adapters, where torchaudio may not fit this torch; as a plain script of one process after PLAIN.

Usage: hf_adapter_job.py [PLAIN] FLAGS
"""

import sys

sys.modules["torchaudio"] = None  # type: ignore[assignment]  # transformers would import it

from recipes.lora import train  # noqa: E402

if __name__ == "__main__":
    if sys.argv[1] == "PLAIN":
        del sys.argv[1]
        train.make_callback = lambda args: None  # type: ignore[assignment]
    train.main()
