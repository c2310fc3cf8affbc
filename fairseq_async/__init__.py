"""Asynchronous training of Transformers, for fairseq and DeepSpeed.

fairseq imports this package as its ``--user-dir``; only then are the optimizers registered with it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:  # ``python -m fairseq_async`` would import a user's types.py or typing.py
    from types import ModuleType

__version__ = "0.1.0"


# Names that scripts and rules of users import, and where these modules are. Hazard: a package in a folder called
# ``torch`` would hide torch itself from a script that is run beside it.
_PUBLIC = {"torch": "pytorch", "config": "options.config", "methods": "method.methods"}


class _PublicNames:
    """Imports modules by the names of ``_PUBLIC``."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        ours = package == __name__ and name.partition(".")[0] in _PUBLIC
        return ModuleSpec(fullname, self) if ours else None  # type: ignore[arg-type]  # a Loader by its methods

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        public, dot, name = spec.name.removeprefix(f"{__name__}.").partition(".")
        module = import_module(f"{__name__}.{_PUBLIC[public]}{dot}{name}")
        spec.loader_state = module.__spec__  # importlib replaces it by the spec of the other name
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _PublicNames())

if "fairseq" in sys.modules:
    from fairseq_async import fairseq_plugin  # noqa: F401
