"""Spares a process of tests what frameworks do again and again, with the same result each time."""

import copy
import functools
import importlib
import inspect
import sys
from typing import Any

import torch


def seed_what_is_here() -> None:
    """Lets ``torch.manual_seed`` leave out the kinds of device that are not here: for each, it keeps the seed with the
    stack of its caller, which takes it a thousand times as long as to seed the CPU."""
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None


def quicken() -> None:
    """Spares what the frameworks that are imported do again; a second call changes nothing."""
    if "fairseq" in sys.modules:
        _quicken_hydra()
    if "deepspeed" in sys.modules:
        _quicken_deepspeed()


@functools.cache
def _quicken_hydra() -> None:
    """Half the time of a short process of fairseq is Hydra's, and most of that goes into what is not needed here. It
    would parse some 250 settings, of which a process has a dozen of its own; copy what it knows of configurations,
    though a second run would make it anew; and look up the lines of source of all its callers."""
    parser = importlib.import_module("hydra.core.override_parser.overrides_parser").OverridesParser
    parse, parsed = parser.parse_rule, {}

    def remembered(self: Any, text: str, rule: str) -> Any:
        if (text, rule) not in parsed:
            parsed[text, rule] = parse(self, text, rule)
        return copy.copy(parsed[text, rule])

    def without_copy(self: Any, delegate: Any) -> None:
        self.delegate, self.cache = delegate, {}

    parser.parse_rule = remembered
    importlib.import_module("hydra._internal.config_repository").CachingConfigRepository.__init__ = without_copy
    inspect.stack = functools.partial(inspect.stack, 0)


@functools.cache
def _quicken_deepspeed() -> None:
    """It asks what the processor is with each Adam on the CPU, and each answer takes a second."""
    cpuinfo = importlib.import_module("cpuinfo")
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
