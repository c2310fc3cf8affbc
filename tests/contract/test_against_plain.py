"""One worker is the plain loop of its front end, or ends with one line where what the plain loop does would be lost.

Missing gradients, frozen layers, schedules, state that is brought along, NaN, steps that the run does not see, and
parameters that something else than a step changes: compared at each step, tensor by tensor. Then what several workers,
a worker that comes later or again, and a checkpoint have in common.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fairseq_async.export import export
from tests.helpers.contract.net import (
    CASES,
    COMPRESSED,
    DEATH,
    DEATHS,
    HALF,
    METHODS,
    STATISTICS,
    STEPS,
    TAKEN,
    TOGETHER,
    Net,
    Run,
)

CHECKPOINTS = {
    "torch_loop": ".server",
    "hf_trainer": f".out-0/checkpoint-{HALF}",
    "deepspeed_engine": ".saved",
    "fairseq_train": f"/checkpoint_1_{HALF}.pt",
}
TWICE, PER_EPOCH = "a schedule stepped twice", "a schedule stepped per epoch"
# as the net itself; the Trainer's and fairseq's optimizers have no frozen layer; fairseq's plain run is resumed
SAME = (
    "swapped and put back",
    "a layer unfrozen",
    "brought",
    TWICE,
    PER_EPOCH,
    "a rate set by hand",
    *list(STATISTICS)[1:],
)
FRONT_ENDS = tuple(CHECKPOINTS)
UNSEEN = ("another optimizer's step", "steps in backward hooks")
SAID = {  # in place of what the case says
    **{("fairseq_train", "hybrid_async", case): TAKEN for case in UNSEEN},
    **{("fairseq_train", "local_sgd", case): "" for case in UNSEEN},  # it takes what another optimizer does
    ("hf_trainer", "hybrid_async", UNSEEN[0]): "give it to the Trainer as optimizers=",
    **{("fairseq_train", method, "brought"): "--reset-optimizer" for method in METHODS},  # it is of another optimizer
    **{
        (front_end, method, case): f"has moved the LambdaLR of the {whose}"
        for front_end, whose in (("deepspeed_engine", "engine"), ("hf_trainer", "Trainer"))
        for method in METHODS
        for case in (TWICE, PER_EPOCH)
    },
    ("torch_loop", "hybrid_async", TWICE): "LambdaLR is stepped more often than the optimizer",
    ("torch_loop", "hybrid_async", PER_EPOCH): "LambdaLR is stepped less often than the optimizer",
    **{("torch_loop", "local_sgd", case): "follows the progress of the run" for case in (TWICE, PER_EPOCH)},
    ("fairseq_train", "hybrid_async", "a rate set by hand"): "the optimizer's param_groups were changed",
}
Of = Callable[..., Any]
pytestmark = pytest.mark.parametrize("front_end", FRONT_ENDS)
both_methods = pytest.mark.parametrize("method", METHODS)


def each_method(cases: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("case", "method"), [(name, method) for name in cases for method in CASES[name].methods]
    )


def trace(ended: Of, front_end: str, case: str, method: str, worker: int = 0) -> Tensor:
    """Of a worker that has ended well."""
    run = ended(front_end, case, method, worker)
    assert run.code == 0 and not run.errors, run.output[-3000:]
    found: Tensor = run.trace
    return found


@each_method(name for name in CASES if name not in TOGETHER | DEATHS | COMPRESSED)
def test_a_worker_is_the_plain_loop_or_ends_with_one_line(ended: Of, front_end: str, case: str, method: str) -> None:
    """To the bit with hybrid_async, but for DeepSpeed and the Trainer, whose optimizers round otherwise."""
    said = SAID.get((front_end, method, case), getattr(CASES[case], method))
    if said:
        run = ended(front_end, case, method)
        (line,) = run.errors
        assert run.code == 2 and said in line and "Traceback" not in run.output, run.output[-3000:]
        return
    found = trace(ended, front_end, case, method)
    expected = (
        trace(ended, front_end, case, "plain") if CASES[case].compared else trace(ended, front_end, "saved", method)
    )
    expected = expected[-len(found) :] if CASES[case].goes_on else expected
    if front_end == "fairseq_train" and case == "NaN" and method == "local_sgd":
        expected = expected[: len(found)]  # a step that is left out counts as one of fairseq's updates
    if method == "hybrid_async" and front_end in ("torch_loop", "fairseq_train") or CASES[case].goes_on:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_cases_differ(ended: Of, front_end: str) -> None:
    """What the front end trains is what the case says, and not the same net each time."""
    cases = [name for name, case in CASES.items() if case.compared and not case.by_number and name not in SAME]
    plain = [trace(ended, front_end, case, "plain")[-1] for case in cases]
    assert len({tuple(each.tolist()) for each in plain}) == len(cases)


@each_method(TOGETHER)
def test_workers_begin_and_end_with_the_same_parameters(ended: Of, front_end: str, case: str, method: str) -> None:
    """Of whatever number and past; between, a run has as many steps as it was told, of all workers together."""
    first, second = (trace(ended, front_end, case, method, worker) for worker in (0, 1))
    assert not torch.equal(first[0], first[-1])
    if CASES[case].options:  # behind the parameters are the statistics
        assert torch.equal(first[-1, -10:], second[-1, -10:]) == ("own" not in case)
        first, second = first[:, :-10], second[:, :-10]
    assert torch.equal(first[-1], second[-1])
    if not CASES[case].options:
        start = trace(ended, front_end, "saved", method)[HALF if CASES[case].goes_on else 0]
        assert torch.equal(first[0], start)


@each_method(DEATHS | COMPRESSED)
def test_a_death_amid_the_run_changes_nothing(
    ended: Of, front_end: str, case: str, method: str, tmp_path: Path
) -> None:
    """But the moments of the killed worker's own optimizer, and the steps of its round, which are gone with it. Two
    workers behind the barrier are the plain loop with the batches of both. What is compressed is near that."""
    plain = trace(ended, front_end, case, "plain")
    for worker in range(CASES[case].workers):
        run = ended(front_end, case, method, worker)
        found, died = trace(ended, front_end, case, method, worker), Path(f"{run.files}-died-{worker}").exists()
        if case in COMPRESSED or (died and method == "local_sgd"):
            net = Net(Run(CASES[case], method, tmp_path))
            before, after = map(net.loss_with, (plain[0], plain[-1]))
            assert abs(net.loss_with(found[-1]) - after) < 0.2 * (before - after)
            continue
        assert len(found) == 1 + STEPS - died * DEATH
        torch.testing.assert_close(found, plain[-len(found) :], rtol=1e-5, atol=1e-6)
        if CASES[case].workers == 2:
            without = trace(ended, front_end, "two behind the barrier", method, worker)
            assert torch.equal(found, without[-len(found) :])


@both_methods
def test_a_checkpoint_is_exported_with_the_parameters_of_its_step(
    ended: Of, front_end: str, method: str, tmp_path: Path
) -> None:
    whole = ended(front_end, "saved", method)
    export(Path(f"{whole.files}{CHECKPOINTS[front_end]}"), tmp_path / "model.safetensors")
    found = {name.removeprefix("net."): each for name, each in load_file(tmp_path / "model.safetensors").items()}
    names = [name for name, _ in Net(Run(CASES["saved"], method, tmp_path)).named_parameters()]
    assert torch.equal(torch.cat([found[name].flatten() for name in names]), whole.trace[HALF])
