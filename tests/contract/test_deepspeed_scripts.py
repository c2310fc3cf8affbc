"""What a script does beside the steps of a real engine: one line, or no mistake."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.contract.deepspeed_scripts import CASES


@pytest.mark.parametrize("method", ["hybrid_async", "local_sgd"])
@pytest.mark.parametrize("case", CASES)
def test_what_the_run_would_not_see_or_the_server_not_take_is_one_line(
    ended: Callable[..., Any], case: str, method: str
) -> None:
    run, said = ended("deepspeed_scripts", case, method), getattr(CASES[case], method)
    assert run.code == (2 if said else 0) and "Traceback" not in run.output, run.output[-3000:]
    assert len(run.errors) == bool(said) and all(said in line for line in run.errors)
    assert run.output.count("call engine.backward(loss) before it") == (case in ("no mistake", "no gradient"))
