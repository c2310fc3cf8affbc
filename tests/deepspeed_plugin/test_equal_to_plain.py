"""DeepSpeed jobs of one worker that must end where torch's SGD ends on the samples that they drew."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from tests.helpers.commands import DEEPSPEED, ROOT, Processes, command

STEPS = 12
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.0}}  # no step of Adam's would show a factor
WARM_UP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 20, "warmup_type": "linear"}}
RATES = [0.05 * max(0, step - 1) / 20 for step in range(STEPS)]  # as DeepSpeed counts: one step late
LOCAL = {
    "method": "local_sgd",
    "outer": "sgd",
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "local_steps": 4,
    "total_steps": STEPS,
}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6}}
BF16 = {"bf16": {"enabled": True}}
FLOAT16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
HALVED = {"async_training": LOCAL | {"outer_lr": 0.5}}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "overlap": ("diloco", {"async_training": LOCAL | {"overlap": True}}),
    "accumulated": ("diloco", {"async_training": LOCAL, "gradient_accumulation_steps": 2}),
    "fp16": ("diloco", {"async_training": LOCAL, **FP16}),
    "fp16_zero": ("diloco", {"async_training": LOCAL, "zero_optimization": {"stage": 1}, **FP16}),
    "bf16": ("diloco", {"async_training": LOCAL, **BF16}),
    "bf16_again": ("diloco", {"async_training": LOCAL, **BF16}),
    "fragments": ("diloco", {"async_training": LOCAL | {"fragments": 2}, "zero_optimization": {"stage": 3}}),
    "nan_overlap": ("diloco", {"async_training": LOCAL | {"overlap": True}}),
    "nan_bf16": ("diloco", {"async_training": LOCAL, **BF16}),
    "nan_float16": ("diloco", {"async_training": LOCAL, **FLOAT16}),
    "nan_hybrid": ("hybrid_async", {"async_training": {"updates_per_step": 2, "total_steps": STEPS // 2}}),
    "hybrid": ("hybrid_async", {"async_training": {"total_steps": STEPS}, "gradient_accumulation_steps": 2}),
    "copying": ("diloco", HALVED),
    "copying_bf16": ("diloco", {**HALVED, **BF16}),
    "copying_zero_2": ("diloco", {**HALVED, "zero_optimization": {"stage": 2}, **BF16}),
    "copying_zero_3": ("diloco", {**HALVED, "zero_optimization": {"stage": 3, "sub_group_size": 100}}),
}
SPOILT = 5  # the batch whose loss is NaN
SPOILT_FIRST = 4  # in nan_hybrid, the first of the two of a step
ZERO_1 = {"zero_allow_untested_optimizer": True}
Result = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Where a job has left what it came to, and what it has seen."""
    out, lines = tmp_path_factory.mktemp("jobs"), []
    for name, (base, change) in JOBS.items():
        change = {"gradient_clipping": 0.0, "optimizer": SGD, "scheduler": WARM_UP, **ZERO_1} | change
        config = ["--deepspeed_config", ROOT / "deepspeed_config" / f"{base}.json", "--change", json.dumps(change)]
        batches = STEPS * change.get("gradient_accumulation_steps", 1)
        number = SPOILT_FIRST if name == "nan_hybrid" else SPOILT
        spoilt = ["--spoil", number] if name.startswith("nan") else []
        loaded = ["--load-weights", out / "bf16" / "checkpoint"] if name == "bf16_again" else []
        copying = ["--copying"] if name.startswith("copying") else []
        given = ("--out", out / name, *config, "--save-at", batches, *spoilt, *loaded, *copying)
        lines.append([str(each) for each in given])
    (out / "jobs.json").write_text(json.dumps(lines))
    line = [command("python"), "-m", "tests.helpers.deepspeed_jobs", out / "jobs.json"]
    with Processes() as processes:
        _, output = processes.run(line, seconds=280, **DEEPSPEED)

    def of(name: str) -> tuple[Path, dict[str, Any]]:
        path = out / name / "worker-0-0.json"
        assert path.exists(), output[-3000:]
        return out / name, json.loads(path.read_text())

    return of


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    return inputs, inputs.sin().sum(1, keepdim=True).double()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def plain(
    drawn: list[float], rates: list[float], micro_batches: int, steps: int = STEPS, outer_lr: float = 1.0
) -> torch.Tensor:
    """What torch comes to in float64, on the samples with these first numbers, in batches of eight; of what a round has
    moved, the server takes the part ``outer_lr``."""
    model, (inputs, targets) = network(), samples()
    numbers = [int((inputs[:, 0] - first).abs().argmin()) for first in drawn]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    for step in range(steps):
        batch = numbers[step * 8 * micro_batches : (step + 1) * 8 * micro_batches]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[batch].double()), targets[batch]).backward()
        optimizer.param_groups[0]["lr"] = rates[step * micro_batches]
        optimizer.step()
        if (step + 1) % LOCAL["local_steps"] == 0:
            before = before.lerp(nn.utils.parameters_to_vector(model.parameters()).detach(), outer_lr)
            nn.utils.vector_to_parameters(before.clone(), model.parameters())
    return flat(model.state_dict())


def flat(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in state.values()])


def server_parameters(out: Path) -> torch.Tensor:
    """Those in the checkpoint."""
    (state,) = (out / "checkpoint").glob("*/async_server.pt")
    parameters: torch.Tensor = torch.load(state, weights_only=True)["server"]["parameters"]
    return parameters


def error(of: torch.Tensor, expected: torch.Tensor) -> float:
    """As a part of how far training has gone."""
    return float((of - expected).norm() / (expected - plain([], [], 1, steps=0)).norm())


EXACT, HALF, BRAIN = 1e-4, 0.02, 0.04
CASES = {"overlap": EXACT, "accumulated": EXACT, "fp16": HALF, "fp16_zero": HALF, "bf16": BRAIN}

KINDS = {"fp16": torch.half, "fp16_zero": torch.half, "bf16": torch.bfloat16}


@pytest.mark.parametrize(("name", "tolerance"), CASES.items())
def test_local_steps_that_the_server_takes_as_they_are_are_plain_sgd(
    result: Result, name: str, tolerance: float
) -> None:
    """The rates are those of the steps, one after the other, and no sample is drawn twice, also where steps are taken
    before the answer to the round before is there. The server's parameters are fp32, and the model's their rounding."""
    if name.startswith("fp16") and not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed has no fp16 on this device")
    if name == "fp16" and deepspeed.__version__.startswith(("0.18.", "0.19.")):
        pytest.skip("this DeepSpeed's own fp16 without ZeRO divides by a loss scale that is not in the loss")
    out, seen = result(name)
    micro_batches = 2 if name == "accumulated" else 1
    drawn, rates = seen["drawn"][: STEPS * 8 * micro_batches], seen["rates"][: STEPS * micro_batches]
    assert len(set(drawn)) == len(drawn) == STEPS * 8 * micro_batches
    assert rates[::micro_batches] == pytest.approx(RATES, abs=1e-6)
    model = torch.load(out / "worker-0-0.pt", weights_only=True)
    assert {tensor.dtype for tensor in model.values()} == {KINDS.get(name, torch.float32)}
    ended = plain(seen["drawn"], seen["rates"], micro_batches, int(seen["progress"]))
    if name == "overlap":  # whose last steps the server had not heard of when the checkpoint was written
        assert error(flat(model), ended) < tolerance
        return
    server = server_parameters(out)
    assert server.dtype == torch.float32 and error(server.double(), ended) < tolerance
    assert torch.equal(flat(model), server.to(KINDS.get(name, torch.float32)).double())


def test_a_plain_checkpoint_without_its_optimizer_gives_its_parameters(result: Result) -> None:
    """Also in bf16 without ZeRO, where DeepSpeed leaves the fp32 masters as they were, which the server gets."""
    (out, _), (_, seen) = result("bf16"), result("bf16_again")
    saved, (inputs, targets) = network(), samples()
    saved.load_state_dict({name: each.double() for name, each in torch.load(out / "worker-0-0.pt").items()})
    first = [int((inputs[:, 0] - number).abs().argmin()) for number in seen["drawn"][:8]]
    loss = nn.functional.mse_loss(saved(inputs[first].double()), targets[first])
    assert seen["losses"][0] == pytest.approx(float(loss), rel=0.02)


def test_fragments_that_the_server_takes_as_they_are_are_plain_sgd_till_they_are_sent(result: Result) -> None:
    """The first tensor, which is the larger half, goes after steps 2, 6 and 10, the others after 4, 8 and 12."""
    out, seen = result("fragments")
    model = flat(torch.load(out / "worker-0-0.pt", weights_only=True))
    before, ended = (plain(seen["drawn"], seen["rates"], 1, steps) for steps in (STEPS - 2, STEPS))
    assert error(model, torch.cat([before[:128], ended[128:]])) < EXACT < error(model, ended)


COPYING = {"copying": EXACT, "copying_bf16": BRAIN, "copying_zero_2": BRAIN, "copying_zero_3": EXACT}


@pytest.mark.parametrize(("name", "tolerance"), COPYING.items())
def test_copies_of_parameters_in_an_optimizer_move_with_the_parameters(
    result: Result, name: str, tolerance: float
) -> None:
    """Also those of fp32 masters, and of partitions of these that are stepped one after the other."""
    out, seen = result(name)
    ended = plain(seen["drawn"], seen["rates"], 1, outer_lr=0.5)
    assert error(server_parameters(out).double(), ended) < tolerance


WITH_NAN = {"nan_overlap": EXACT, "nan_bf16": BRAIN, "nan_float16": HALF}


@pytest.mark.parametrize(("name", "tolerance"), WITH_NAN.items())
def test_a_local_step_with_nan_is_left_out_and_does_not_count(result: Result, name: str, tolerance: float) -> None:
    """The parameters are those of the other batches, in the moments of whose optimizer is no NaN."""
    out, seen = result(name)
    left_out = [batch for batch, applied in enumerate(seen["applied"]) if not applied]
    assert SPOILT in left_out and seen["skipped"] == len(left_out)
    assert len(left_out) == 1 or name == "nan_float16"  # whose loss scale begins too high
    assert len(seen["losses"]) == STEPS + len(left_out) or name == "nan_overlap"  # which has gone on meanwhile
    assert seen["rates"][SPOILT + 1] == seen["rates"][SPOILT]  # the run has not moved on
    kept = [batch for batch, applied in enumerate(seen["applied"]) if applied]
    drawn = [first for batch in kept for first in seen["drawn"][8 * batch : 8 * (batch + 1)]]
    rates = [seen["rates"][batch] for batch in kept]
    model = torch.load(out / "worker-0-0.pt", weights_only=True)
    assert error(flat(model), plain(drawn, rates, 1, int(seen["progress"]))) < tolerance


def test_a_gradient_with_nan_is_the_step_that_was_not_applied(result: Result) -> None:
    """Also where it completes no step: such a gradient is answered before the server has looked at it."""
    _, seen = result("nan_hybrid")
    left_out = [batch for batch, applied in enumerate(seen["applied"][:STEPS]) if not applied]
    assert left_out == [SPOILT_FIRST] and seen["skipped"] == 1 and seen["progress"] == STEPS // 2


def test_hybrid_async_pushes_the_mean_of_the_micro_batches_and_nothing_of_the_step_before(result: Result) -> None:
    out, seen = result("hybrid")
    events = [json.loads(line) for line in (out / "run" / "events.jsonl").open()]
    assert [event["weight"] for event in events] == [16.0] * STEPS
    assert len(set(seen["drawn"])) == len(seen["drawn"]) == STEPS * 16
    ended = torch.load(out / "worker-0-0.pt", weights_only=True)
    assert error(flat(ended), plain(seen["drawn"], [rate for rate in RATES for _ in range(2)], 2)) < EXACT
    assert seen["rates"][2:] == pytest.approx([rate for rate in RATES[1:] for _ in range(2)])
