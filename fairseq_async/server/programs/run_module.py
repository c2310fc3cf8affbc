"""``python run_module.py MODULE ARGUMENT …``: runs a module as ``python -m`` does, but imports nothing from the working
directory, where a user's ``queue.py`` or ``random.py`` would take the place of the standard library's.

From version 3.11 on, Python's own ``-P`` does the same. ``PYTHONPATH`` holds as ever.
"""

import sys


def main() -> None:
    """Runs the module that the command line names, with this file's own copy of the package."""
    import runpy  # from the standard library: this file's folder is no longer on the path
    from pathlib import Path  # this too

    sys.path.insert(0, package := str(Path(__file__).parents[3]))
    import fairseq_async  # noqa: F401  # the copy of the process that has started this one, though not installed

    sys.path.remove(package)
    if package not in sys.path:
        sys.path.append(package)  # last: what is beside the package, as scripts/, hides nothing
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH
        del sys.path[0]  # this file's folder
    main()
