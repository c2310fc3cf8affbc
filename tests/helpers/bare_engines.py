"""Engines of DeepSpeed without DeepSpeed's part, for tests of one method of theirs at a time."""

from typing import Any

from torch import nn


def bare(kind: Any, **attributes: Any) -> Any:
    """An engine of this class with these attributes alone."""
    engine = kind.__new__(kind)
    nn.Module.__init__(engine)
    vars(engine).update(attributes)
    return engine


def noting(did: list[Any], name: str, answer: object = None) -> Any:
    """A function that notes its name and what it is given, and returns the answer."""

    def note(*given: object, **named: object) -> object:
        did.append((name, *given, *named.items()) if given or named else name)
        return answer

    return note
