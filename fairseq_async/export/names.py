"""The names that a model's tensors have, with and without what wrappers have added."""

from collections.abc import Collection

_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile, and of recomputed activations


def unwrapped(name: str) -> str:
    """Returns the name without the parts that stand for no module of the model's own."""
    return ".".join(part for part in name.split(".") if part not in _TRANSPARENT)


def fitted(names: Collection[str], known: Collection[str]) -> dict[str, str] | None:
    """Returns which of a model's ``known`` names each of these is, if an outer module has put the same before all of
    them, or lacks the same; None where they differ in another way."""
    plain = {name: unwrapped(name) for name in names}
    first = min(plain.values(), default="")
    for each in known:
        if first == each or first.endswith(f".{each}"):
            before, after = first[: len(first) - len(each)], ""
        elif each.endswith(f".{first}"):
            before, after = "", each[: len(each) - len(first)]
        else:
            continue
        if all(name.startswith(before) and after + name[len(before) :] in known for name in plain.values()):
            return {name: after + short[len(before) :] for name, short in plain.items()}
    return None
