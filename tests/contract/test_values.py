"""Zero, values out of range, nothing, truth values: each front end takes a value as it is, or names the option.

A value that is taken for "not given" trains with the default, and nobody is told.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from fairseq_async.deepspeed_plugin import config
from fairseq_async.errors import as_argument, as_key, spell_options
from fairseq_async.method import methods
from fairseq_async.method.option_flags import add_method_flags, method_options, server_options_of, spelling
from fairseq_async.options.config import ServerOptions
from fairseq_async.pytorch.options import parse_options

NUMBERS: tuple[Any, ...] = (0, -1, "", 1 << 70, 1e300)
WORDS: tuple[Any, ...] = (*NUMBERS, True, False, [], {})
Parse = Callable[[str, dict[str, Any]], tuple[Any, Any]]  # of a method: the options of the server, and its own


@cache
def parser(method: str) -> ArgumentParser:
    made = ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_method_flags(made, method)
    return made


def fairseq(method: str, given: dict[str, Any]) -> tuple[Any, Any]:
    line = [f"{spelling(method, name)}={value}" for name, value in given.items()]
    args = parser(method).parse_args(line)
    server = None if method in methods.SYNCHRONOUS else server_options_of(method, args)
    return server, method_options(methods.METHODS[method], args, {})


def deepspeed(method: str, given: dict[str, Any]) -> tuple[Any, Any]:
    return config.split({config.SECTION: {"method": method, **given}}, "ds.json")[1:]


def pytorch(method: str, given: dict[str, Any]) -> tuple[Any, Any]:
    return parse_options(methods.METHODS[method], given, "here")  # type: ignore[type-var]


FRONT_ENDS: dict[str, tuple[Parse, Callable[[str, str], str], tuple[Any, ...], tuple[str, ...]]] = {
    "fairseq": (fairseq, spelling, NUMBERS, ("total_steps", "seed", "micro_batches")),
    "DeepSpeed": (deepspeed, lambda method, name: as_key(name), WORDS, ()),
    "PyTorch": (pytorch, lambda method, name: as_argument(name), WORDS, ("shards",)),
}
CASES = [(front_end, method) for front_end in FRONT_ENDS for method in methods.METHODS]
CASES = [each for each in CASES if each[0] != "PyTorch" or each[1] not in methods.SYNCHRONOUS]


def options_of(method: str, others: tuple[str, ...]) -> Iterator[tuple[dict[str, str], str, bool]]:
    """Yields each rule as it is given, with each option, and whether the rule has it."""
    models, key = methods.models(method), methods.rule_key(method)
    known = {name for model in models.values() for name in model.model_fields}
    of_server = set() if method in methods.SYNCHRONOUS else set(ServerOptions.model_fields)
    for number, (rule, model) in enumerate(models.items()):
        for name in sorted((known | (set() if number else of_server)) - {"method", key, *others}):
            has = name in model.model_fields or name in of_server
            yield {} if key is None else {key: rule}, name, has


@pytest.mark.parametrize(("front_end", "method"), CASES)
def test_a_value_is_taken_as_it_is_or_its_option_is_named(front_end: str, method: str) -> None:
    parse, spell, values, others = FRONT_ENDS[front_end]
    spell_options(lambda name: spell(method, name))
    wrong = []
    for rule, name, has in options_of(method, others):
        for value in values:
            try:
                server, options = parse(method, {**rule, name: value})
            except Exception as error:  # argparse's, too
                if name not in str(error).replace("-", "_"):
                    wrong.append(f"{rule} {name}={value!r}: {error!r}")
                continue
            taken = getattr(options, name, getattr(server, name, None))
            is_off = value in (0, False) and not taken and (not has or isinstance(taken, bool) or name == "look_ahead")
            is_path = front_end == "fairseq" and taken == str(value)
            same = taken == value and isinstance(taken, bool) == isinstance(value, bool)
            if not (same or is_off or is_path or (value == {} and name == "compress")):
                wrong.append(f"{rule} {name}={value!r} becomes {taken!r}")
    assert not wrong, "\n".join(wrong[:20])
