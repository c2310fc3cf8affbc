"""A torchaudio that cannot be loaded, as pip installs it with fairseq beside a torch for CPUs."""

import sys


def hide_broken_torchaudio() -> None:
    """Hides a torchaudio that was built for another torch: transformers would import it, and fail with it."""
    # Reason: the import is the only test of whether torchaudio's library can be loaded.
    try:
        import torchaudio  # noqa: F401
    except ImportError:
        pass
    except OSError:
        sys.modules["torchaudio"] = None  # type: ignore[assignment]  # to transformers it is not installed then
