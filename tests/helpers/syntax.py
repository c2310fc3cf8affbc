"""Syntax trees of source files."""

import ast
import gc
from pathlib import Path


def parsed(source: str) -> ast.Module:
    """Parses, without garbage collections meanwhile.

    Before CPython 3.11.8 and 3.12.2 all parsings of a process share one counter of the depth
    (https://github.com/python/cpython/issues/106905): a finalizer that parses, as one does that formats a traceback,
    or another thread that gets its turn in a finalizer, makes an outer ``ast.parse`` raise SystemError.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()


def syntax_tree(path: Path) -> ast.Module:
    return parsed(path.read_text(encoding="utf-8"))
