"""Makes the flags of a command line, and the rows of a table, from the models of a method's options."""

from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar, get_args

from pydantic.fields import FieldInfo

from fairseq_async.errors import ConfigurationError, as_flag
from fairseq_async.method import methods
from fairseq_async.method.global_server import parse_upstream
from fairseq_async.options.config import HybridOptions, LocalSGDOptions, Options, ServerOptions
from fairseq_async.options.validation import checked, gone

_WITHOUT_FLAG = ("method", "total_steps", "seed", "micro_batches")  # fairseq has its own for the last three
_OF_FAIRSEQ = {"total_steps": "--max-update", "micro_batches": "--update-freq"}
_Options = TypeVar("_Options", bound=Options)
_LAST = ("total_steps", "shards", "seed", "upstream")  # shown last in help and tables


@dataclass(frozen=True)
class Option:
    """One option of a method.

    Attributes:
        switch: whether the flag takes no value and switches the option on; an option that may be on by default is not a
            switch, and takes "on" or "off".
        number: whether the flag's value is a number, which the model checks.
        default: the default in words, as help and tables show it.
        metavar: placeholder of the value in help and tables; empty for a switch.
    """

    name: str
    description: str
    switch: bool
    number: bool
    default: str
    metavar: str

    @property
    def flag(self) -> str:
        return as_flag(self.name)

    @property
    def help(self) -> str:
        """The help text for argparse, in which % is escaped."""
        return f"{self.description} ({self.default})".replace("%", "%%")


INNER_OPTIMIZER = Option(
    "inner_optimizer",
    "fairseq optimizer that takes the steps, with its own flags such as --adam-betas",
    switch=False,
    number=False,
    default="adam",
    metavar="NAME",
)

MICRO_BATCHES = Option(
    "micro_batches",
    "cut each batch into so many, each of --max-tokens or --batch-size divided by M, which a step accumulates; so that "
    "--shares has something to divide",
    switch=False,
    number=True,
    default="1",
    metavar="M",
)


# fairseq's optimizers that cannot be inner ones: composite takes a nested configuration that a command line cannot
# give, and the others need a CUDA device, while a server is on the CPU.
_NOT_INNER = {"composite", "cpu_adam"}
_NOT_IN_A_SERVER = {"lamb"}
_OF_THE_PACKAGE = {"muon"}  # which the synchronous methods do not tell whose a parameter is
_OF_ADASCALE = {"adam", "nag", "sgd"}  # AdaScale has a rule for these


def check_inner_optimizer(method: str, name: str, known: Collection[str]) -> None:
    """Checks that a method works with this inner optimizer.

    Args:
        known: the names of fairseq's optimizers.

    Raises:
        ConfigurationError: it does not; the message names the optimizers with which it does.
    """
    choices = set(known) - set(methods.METHODS) - _NOT_INNER
    if method not in methods.SYNCHRONOUS:
        choices = (choices | _OF_THE_PACKAGE) - _NOT_IN_A_SERVER
    else:
        choices = choices & _OF_ADASCALE if method == "adascale" else choices - _OF_THE_PACKAGE
    if name not in choices:
        raise ConfigurationError(f"{INNER_OPTIMIZER.flag} {name}: {method} has {', '.join(sorted(choices))}")


def options_of_method(method: str) -> list[Option]:
    """Returns all options of a method and its rules; the description of an option says which rules lack it."""
    models, key = methods.models(method), methods.rule_key(method)
    found: dict[str, Option] = {}
    for model in models.values():
        for name, field in model.model_fields.items():
            found.setdefault(name, _option(name, field))
    found.pop("method")
    described = [replace(each, description=_with_rules(each, models)) for each in found.values()]
    if key is not None:
        choice = _option(key, methods.METHODS[method].model_fields[key])
        words = f"{choice.description}: {', '.join(models)}"
        described[0] = replace(choice, description=words, metavar="NAME")
    return sorted(described, key=lambda option: option.name in _LAST)


def server_options(model: type[ServerOptions] = ServerOptions) -> list[Option]:
    """Returns the options that every method with a server has."""
    return [_option(name, field) for name, field in model.model_fields.items()]


def flags_of(method: str) -> list[Option]:
    """Returns the options of a method that are flags of ``fairseq-train``, without the server's."""
    return [option for option in options_of_method(method) if option.name not in _WITHOUT_FLAG]


def server_flags() -> list[Option]:
    """Returns the server's options as flags of ``fairseq-train``; ``--run-dir`` is its ``--save-dir`` by default."""
    return [replace(each, default="--save-dir") if each.name == "run_dir" else each for each in server_options()]


def add_method_flags(parser: ArgumentParser, method: str) -> None:
    """Adds a flag to the parser for each option of the method, and of its server."""
    for option in flags_of(method):
        _add(parser, option, spelling(method, option.name), _dest(method, option.name))
    if method not in methods.SYNCHRONOUS:
        for option in server_flags():
            _add(parser, option, option.flag, option.name)
        for name, instead in methods.METHODS[method].removed.items():
            flag = as_flag(name)
            parser.add_argument(
                flag, nargs="?", action=_Gone, const=instead, default=SUPPRESS, help=SUPPRESS, dest=name
            )


def method_options(model: type[_Options], args: Namespace, others: Mapping[str, object]) -> _Options:
    """Returns a method's options from the parsed flags.

    Args:
        model: one of :data:`~fairseq_async.method.methods.METHODS`.
        others: values of options for which fairseq has flags of its own.

    Raises:
        ConfigurationError: a value is out of its range, or the chosen rule does not use a flag.
    """
    method = str(model.model_fields["method"].default)
    values = {**given(model, args), **others}
    return methods.parse(model, values, f"--optimizer {method}", lambda name: spelling(method, name))


def given(model: type[Options], args: Namespace) -> dict[str, object]:
    """Returns the values of those flags of a method that the command has."""
    method = str(model.model_fields["method"].default)
    values = {option.name: getattr(args, _dest(method, option.name)) for option in flags_of(method)}
    return {name: value for name, value in values.items() if value is not None}


def server_options_of(method: str, args: Namespace) -> ServerOptions:
    """Returns the server's options from the parsed flags.

    Raises:
        ConfigurationError: a value is out of its range.
    """
    values = {name: getattr(args, name) for name in ServerOptions.model_fields}
    given = {name: value for name, value in values.items() if value is not None}
    return checked(ServerOptions, given, f"--optimizer {method}", as_flag)


def check_command(method: str, arguments: Sequence[str], workers: int | None) -> None:
    """Checks our flags among the arguments of ``fairseq-train``, without importing fairseq.

    Raises:
        ConfigurationError: a flag lacks its value, a value is bad, or the options do not go with this number of
            workers.
    """
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    add_method_flags(parser, method)
    args = parser.parse_known_args(list(arguments))[0]
    options = method_options(methods.METHODS[method], args, {})
    if method in methods.SYNCHRONOUS:
        return
    server_options_of(method, args)
    if isinstance(options, LocalSGDOptions) and options.upstream is not None:
        parse_upstream(options.upstream)
    if workers is not None and isinstance(options, LocalSGDOptions | HybridOptions):
        options.for_workers(workers)


def spelling(method: str, name: str) -> str:
    """Returns the flag of a method's option; the flags of a synchronous method begin with the method's name."""
    if name in _OF_FAIRSEQ:
        return _OF_FAIRSEQ[name]
    return as_flag(f"{method}_{name}" if method in methods.SYNCHRONOUS else name)


def _option(name: str, field: FieldInfo) -> Option:
    kinds = {field.annotation, *get_args(field.annotation)}
    shown = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    switch, number = bool in kinds and "metavar" not in shown, bool({int, float} & kinds)
    metavar = "" if switch else str(shown.get("metavar", _metavar(name, kinds)))
    default = str(shown.get("default", _in_words(field.default)))
    return Option(name, field.description or "", switch, number, default, metavar)


def _metavar(name: str, kinds: set[object]) -> str:
    if int in kinds:
        return "N"
    return "X" if float in kinds else name.split("_")[-1].upper()


def _in_words(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, float):
        return f"{default:g}"
    return "none" if default is None else str(default)


def _with_rules(option: Option, models: Mapping[str, type[Options]]) -> str:
    have = [name for name, model in models.items() if option.name in model.model_fields]
    lack = [name for name in models if name not in have]
    if not lack:
        return option.description
    return f"{option.description}; " + (
        f"only with {_all(have)}" if len(have) < len(lack) else f"not with {_all(lack)}"
    )


def _all(names: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _number(text: str) -> int | float | str:
    """Converts text to a number; other text stays as it is, so that the model reports it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


class _Gone(Action):
    """The action of a flag of before: an error that says what to write in its place."""

    def __call__(self, parser: ArgumentParser, *_: object) -> NoReturn:
        parser.error(gone(self.dest, str(self.const), as_flag))


class OneLineParser(ArgumentParser):
    """An argument parser that raises its errors, in one line, instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raises the message as an error.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(message)


def _dest(method: str, name: str) -> str:
    """Returns a flag's attribute with the method as a prefix: fairseq takes a flag of any component for its own where
    the names are alike, as --delay."""
    return f"{method}_{name}"


def _add(parser: ArgumentParser, option: Option, flag: str, dest: str) -> None:
    if option.switch:
        parser.add_argument(flag, dest=dest, action="store_true", default=None, help=option.help)
    else:
        kind = _number if option.number else str
        parser.add_argument(flag, dest=dest, type=kind, metavar=option.metavar, help=option.help)
