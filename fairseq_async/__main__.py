"""``python -m fairseq_async``: the same as ``fairseq-async``."""

import sys

if __name__ == "__main__":
    if "-m" in sys.orig_argv[: -len(sys.argv)] and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the working directory, where a user's queue.py would hide the standard library's

    from fairseq_async.cli import main  # only then

    main()
