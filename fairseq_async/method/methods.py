"""The methods, their rules and the options of both.

A user's own rule is in a file or module that calls :func:`register_outer_rule`; the environment variable
``FAIRSEQ_ASYNC_PLUGINS`` names it, for every process of a run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from fairseq_async.environment import PLUGINS
from fairseq_async.errors import ConfigurationError
from fairseq_async.method.rules import OUTER_RULES, OuterRule, RuleContext, register_outer_rule
from fairseq_async.options.config import AdaScaleOptions, AdasumOptions, HybridOptions, LocalSGDOptions, Options
from fairseq_async.options.validation import Spell, checked

__all__ = [
    "METHODS",
    "SYNCHRONOUS",
    "MethodOptions",
    "OuterRule",
    "RuleContext",
    "import_plugins",
    "models",
    "outer_rule",
    "outer_rules",
    "parse",
    "plugin_modules",
    "register_outer_rule",
    "rule_key",
]

MethodOptions = LocalSGDOptions | HybridOptions | AdasumOptions | AdaScaleOptions
METHODS: dict[str, type[MethodOptions]] = {
    "local_sgd": LocalSGDOptions,
    "hybrid_async": HybridOptions,
    "adasum": AdasumOptions,
    "adascale": AdaScaleOptions,
}
SYNCHRONOUS = ("adasum", "adascale")  # the ranks of one data-parallel group; no server
_Options = TypeVar("_Options", bound=Options)


def outer_rules() -> Mapping[str, OuterRule[LocalSGDOptions]]:
    """Returns all outer rules by name, in the order in which they were registered."""
    import_plugins()
    return OUTER_RULES


def outer_rule(name: str) -> OuterRule[LocalSGDOptions]:
    """Returns the outer rule of this name.

    Raises:
        ConfigurationError: there is no rule of this name.
    """
    rules = outer_rules()
    if name not in rules:
        raise ConfigurationError(f"outer {name}: there is no such rule; there are {', '.join(rules)}")
    return rules[name]


def models(method: str) -> Mapping[str, type[Options]]:
    """Returns the models of a method's options by the name of their rule; a method without rules has one, named ''."""
    import_plugins()  # whatever they register: they are for every process of a run
    if method == "local_sgd":
        return {name: rule.options for name, rule in outer_rules().items()}
    return {"": METHODS[method]}


def rule_key(method: str) -> str | None:
    """Returns the name of the option that chooses a method's rule; None for a method without rules."""
    return "outer" if method == "local_sgd" else None


def parse(
    base: type[_Options],
    values: Mapping[str, object],
    where: str,
    spell: Spell = '"{}"'.format,
    also_known: Iterable[str] = (),
    not_known: Collection[str] = (),
) -> _Options:
    """Parses the options of a method from flags or keys, with the model of the rule that they name.

    Args:
        base: the model that those of the method's rules extend; one of :data:`METHODS`.
        where: name of the place of the options, for errors.
        spell: spells a key in errors.
        also_known: options that are known there besides those of the method, for the error of an unknown one.
        not_known: options of either that are none there.

    Raises:
        ConfigurationError: a rule or key is unknown, a value is not valid, or an option is only for other rules.
    """
    method = str(base.model_fields["method"].default)
    known, key = models(method), rule_key(method)
    if key is None:
        return checked(base, values, where, spell, also_known, not_known)
    name = values.get(key, base.model_fields[key].default)
    if not isinstance(name, str) or name not in known:
        raise ConfigurationError(f"{where}: {spell(key)}: Input should be {_one_of(list(known))} (it is {name!r})")
    fields = {field: info for model in known.values() for field, info in model.model_fields.items()}
    of_others = set(fields) - set(known[name].model_fields)
    given = {option: value for option, value in values.items() if option not in of_others}
    options = checked(cast("type[_Options]", known[name]), given | {key: name}, where, spell, also_known, not_known)
    for option in values:
        if option in of_others and not _is_off(values[option], fields[option].default):
            raise ConfigurationError(f"{where}: {spell(option)} is of no use with {spell(key)} {name}: leave it out")
    return options


def _is_off(value: object, default: object) -> bool:
    """Whether a value switches its option off. 0 does not where None does, as a grace period of 0, or where 0 is out of
    range, as a number of fragments; nor does an empty text."""
    is_zero = isinstance(value, int | float) and not value
    return value is None or (is_zero and (value == default or isinstance(default, bool | float)))


def _one_of(names: Sequence[str]) -> str:
    """Lists the names as pydantic lists allowed values."""
    quoted = [repr(name) for name in names]
    return " or ".join(part for part in (", ".join(quoted[:-1]), quoted[-1]) if part)


_imported: set[str] = set()
_importing = threading.RLock()  # no thread may find a plugin half imported


def import_plugins() -> None:
    """Imports the files and modules that ``FAIRSEQ_ASYNC_PLUGINS`` names, each once in this process.

    Raises:
        ConfigurationError: one of them cannot be imported.
    """
    with _importing:
        for name in filter(None, map(str.strip, os.environ.get(PLUGINS, "").split(","))):
            if name not in _imported:
                _imported.add(name)  # before the import: the plugin may call outer_rules itself
                try:
                    _import_plugin(name)
                except Exception as error:  # a user's file may raise anything
                    _imported.discard(name)
                    said = " ".join(f"{type(error).__name__}: {error}".split())
                    raise ConfigurationError(f"{PLUGINS}: {name} cannot be imported: {said}") from error


def plugin_modules() -> list[str]:
    """Returns the names of the modules that ``FAIRSEQ_ASYNC_PLUGINS`` names, imported.

    Raises:
        ConfigurationError: one of them cannot be imported.
    """
    import_plugins()
    return [Path(name).stem if name.endswith(".py") else name for name in _imported]


def _import_plugin(name: str) -> None:
    path = Path(name).resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a user's queue.py hides no module that is installed
    if not name.endswith(".py"):
        importlib.import_module(name)
        return
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None  # it ends in .py
    module = sys.modules[path.stem] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
