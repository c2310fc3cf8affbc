"""What fairseq makes of flags."""

import sys
from typing import Any

import pytest
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import fairseq_async.fairseq_plugin  # noqa: F401
from tests.helpers.commands import MODEL


def parsed(monkeypatch: pytest.MonkeyPatch, *flags: object) -> Any:
    arguments = ["data", *MODEL, *map(str, flags)]
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *arguments])
    args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), arguments)
    return convert_namespace_to_omegaconf(args)
