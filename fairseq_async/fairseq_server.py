"""``python -m fairseq_async.fairseq_server``: the server of a ``hybrid_async`` run in fairseq.

``import fairseq`` imports every task and criterion that it has, and for two of them scikit-learn and SciPy, and for an
optimizer that runs on GPUs DeepSpeed. None of it is of use to the server, and a run whose server died waits for it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

# what criterions and tasks of classification import, with the names that they take from it
_OF_CLASSIFICATION = {
    "sklearn": ["metrics"],
    "sklearn.metrics": ["f1_score", "matthews_corrcoef"],
    "scipy": ["stats"],
    "scipy.stats": ["pearsonr", "spearmanr"],
}
_OPTIONAL = "deepspeed"  # fairseq does without it where it is missing


@contextmanager
def _without_classification() -> Iterator[None]:
    """Within this, empty modules are imported in place of those; afterwards a plugin of the user's gets the real ones.

    Hazard: fairseq's criterions of classification keep what they have imported, so that they cannot be used in this
    process. It trains nothing.
    """
    placed: dict[str, ModuleType | None] = {_OPTIONAL: None}  # None: the import raises an ImportError
    for name, taken in _OF_CLASSIFICATION.items():
        placed[name] = ModuleType(name)
        vars(placed[name]).update(dict.fromkeys(taken))
    placed = {name: module for name, module in placed.items() if name not in sys.modules}
    sys.modules.update(placed)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in placed:
            sys.modules.pop(name, None)


if __name__ == "__main__":
    with _without_classification():
        from fairseq_async.fairseq_plugin.server import build  # after the empty modules are in place

    from fairseq_async.server.program import serve  # after them, too: it imports torch

    serve(build)
