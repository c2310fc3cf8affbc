"""Loops with accelerate and without a Trainer: one worker is the plain loop, or ends with one line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.contract.accelerate_loop import CASES
from tests.helpers.contract.net import METHODS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_a_loop_with_accelerate_is_the_plain_one_or_ends_with_one_line(
    ended: Callable[..., Any], case: str, method: str
) -> None:
    run, said = ended("accelerate_loop", case, method), getattr(CASES[case], method)
    assert run.code == (2 if said else 0) and "Traceback" not in run.output, run.output[-3000:]
    assert len(run.errors) == bool(said) and all(said in line for line in run.errors)
    if CASES[case].compared:
        plain = ended("accelerate_loop", case, "plain").trace
        torch.testing.assert_close(run.trace, plain, rtol=1e-5, atol=1e-6)
