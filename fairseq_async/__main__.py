"""``python -m fairseq_async``: the same as ``fairseq-async``."""

from fairseq_async.cli import main

if __name__ == "__main__":
    main()
