"""In place of fairseq for DeepSpeed's processes: they need none, and DeepSpeed takes seconds to import one it finds."""

raise ImportError("as where fairseq is not installed")
