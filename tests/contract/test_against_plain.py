"""One worker is the plain loop of its front end, or ends with one line where what the plain loop does would be lost.

Missing gradients, frozen layers, and parameters that something else than a step changes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.contract.net import CASES, MISSING

FRONT_ENDS = ("torch_loop", "hf_trainer", "deepspeed_engine", "fairseq_train")


@pytest.mark.parametrize("method", ["hybrid_async", "local_sgd"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_worker_is_the_plain_loop_or_ends_with_one_line(
    ended: Callable[..., Any], front_end: str, case: str, method: str
) -> None:
    """To the bit with hybrid_async, but for DeepSpeed and the Trainer, whose optimizers round otherwise."""
    plain, run = ended(front_end, case, "plain"), ended(front_end, case, method)
    said = getattr(CASES[case], method)
    assert plain.code == 0, plain.output[-3000:]
    if said:
        (line,) = run.errors
        assert run.code == 2 and said in line and "Traceback" not in run.output, run.output[-3000:]
        return
    assert run.code == 0 and not run.errors, run.output[-3000:]
    if method == "hybrid_async" and front_end in ("torch_loop", "fairseq_train"):
        assert torch.equal(run.parameters, plain.parameters)
    else:
        torch.testing.assert_close(run.parameters, plain.parameters, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_the_cases_differ(ended: Callable[..., Any], front_end: str) -> None:
    """What the front end trains is what the case says, and not the same net each time."""
    cases = [*MISSING, "clamped", "loaded", "a layer made anew"]
    plain = [ended(front_end, case, "plain").parameters for case in cases]
    assert len({tuple(each.tolist()) for each in plain}) == len(cases)
