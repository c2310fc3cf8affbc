"""``"method": "adasum"`` and ``"adascale"`` in DeepSpeed, against both methods written down once more."""

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from fairseq_async.algorithms import AdaScaleGain, adasum
from fairseq_async.deepspeed_plugin import config as configuration
from fairseq_async.errors import ConfigurationError
from fairseq_async.options.addresses import free_port
from tests.helpers.commands import DEEPSPEED, HELPERS, Processes, command
from tests.helpers.deepspeed_ranks import network

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0, "torch_adam": True}}
WARM_UP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 12, "warmup_type": "linear"}}


def configured(section: dict[str, Any], optimizer: dict[str, Any] = SGD, **changes: Any) -> dict[str, Any]:
    section = {"total_steps": 6} | section
    base = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": 2000000000, "optimizer": optimizer}
    base["gradient_clipping"] = 0.0  # DeepSpeed's default is 1
    return base | {"async_training": section} | changes


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True} if stage else {}


BF16 = {"bf16": {"enabled": True}}
FLOAT16 = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
ADASUM, ADASCALE = {"method": "adasum"}, {"method": "adascale"}
HALF_CASES = ("half", "half_weights")
LONG = ADASCALE | {"total_steps": 24}
CASES: dict[str, dict[str, Any]] = {
    **{f"gradient_{stage}": {"config": configured(ADASUM, **zero(stage))} for stage in (0, 1, 2)},
    **{f"delta_{stage}": {"config": configured(ADASUM, ADAM, **zero(stage))} for stage in (0, 1, 2)},
    "delta_averaged": {"config": configured(ADASUM | {"sync_state": 2}, ADAM, **zero(1))},
    "accumulated": {"config": configured(ADASUM, gradient_accumulation_steps=2, **zero(1))},
    "clipped": {"config": configured(ADASUM, gradient_clipping=0.05)},
    "clipped_delta": {"config": configured(ADASUM | {"total_steps": 1, "clip_delta": 0.01}, ADAM)},
    "adasum_bf16": {"config": configured(ADASUM | {"total_steps": 32}, ADAM, **zero(1), **BF16)},
    "nan_0": {"config": configured(ADASUM), "nan": 3},
    "nan_1": {"config": configured(ADASUM, ADAM, **zero(1)), "nan": 3},
    "differ": {"config": configured(ADASUM), "differ": True},
    "adasum_by_hand": {"config": configured(ADASUM), "by_hand": True},
    "adascale_by_hand": {"config": configured(ADASCALE), "by_hand": True},
    "one_node": {"config": configured(ADASUM | {"hierarchy": "node"})},
    "unstepped": {"config": configured(ADASUM), "from": 2},
    "straight": {"config": configured(ADASUM | {"sync_state": 5}, ADAM, **zero(1)), "save_at": 4},
    "resumed": {"config": configured(ADASUM | {"sync_state": 5}, ADAM, **zero(1)), "load": "straight"},
    "half": {"config": configured(ADASUM | {"total_steps": 8}, ADAM, **BF16), "save_at": 8},
    "half_weights": {"config": configured(ADASUM | {"total_steps": 9}, ADAM, **BF16), "load": "half", "weights": True},
    "from_nothing": {"config": configured(ADASUM), "load": "no such directory"},
    **{f"adascale_{stage}": {"config": configured(LONG, **zero(stage))} for stage in (0, 1, 2)},
    "adascale_accumulated": {"config": configured(LONG, gradient_accumulation_steps=2, **zero(2))},
    "adascale_scheduled": {
        "config": configured(LONG, gradient_accumulation_steps=2, scheduler=WARM_UP, gradient_clipping=0.5),
        "save_at": 8,
    },
    "adascale_resumed": {
        "config": configured(LONG, gradient_accumulation_steps=2, scheduler=WARM_UP, gradient_clipping=0.5),
        "load": "adascale_scheduled",
    },
    "adascale_warm": {
        "config": configured(LONG, gradient_accumulation_steps=2, scheduler=WARM_UP, gradient_clipping=0.5),
        "load": "adascale_scheduled",
        "only": True,
    },
    "adascale_adam": {"config": configured(LONG, ADAM)},
    "adascale_bf16": {"config": configured(ADASCALE | {"total_steps": 40}, ADAM, **zero(1), **BF16)},
    "adascale_fp32_sums": {"config": configured(LONG, **zero(1), **BF16, data_types={"grad_accum_dtype": "fp32"})},
    "adascale_nan": {"config": configured(LONG), "nan": 3},
    **{
        f"sparse_{section['method']}": {"config": configured(section), "sparse": True} for section in (ADASUM, ADASCALE)
    },
    "gradient_float16": {"config": configured(ADASUM, **FLOAT16), "nan": 3},
    "delta_float16": {"config": configured(ADASUM, ADAM, **FLOAT16), "nan": 3},
    "adascale_float16": {"config": configured(LONG, **FLOAT16)},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("cases")
    (folder / "cases.json").write_text(json.dumps([{"name": name, **case} for name, case in CASES.items()]))
    port = free_port()
    launcher = [command("deepspeed"), "--num_accelerators", 2, "--master_port", port]
    with Processes() as processes:
        line = [*launcher, HELPERS / "deepspeed_ranks.py", folder / "cases.json"]
        _, output = processes.run(line, seconds=280, **DEEPSPEED)
    assert not list(Path("/dev/shm").glob(f"*_{port}_*")), "DeepSpeed's buffers are left behind"

    def of(name: str) -> list[dict[str, Any]]:
        paths = [folder / f"{name}-{rank}.pt" for rank in (0, 1)]
        assert all(path.exists() for path in paths), output[-3000:]
        both = [torch.load(path, weights_only=True) for path in paths]
        if "model" in both[0]:
            assert all(torch.equal(both[0]["model"][key], both[1]["model"][key]) for key in both[0]["model"])
        return both

    return of


Batch = tuple[Tensor, Tensor]


def gradients(model: nn.Module, batches: Sequence[Batch]) -> list[Tensor]:
    """Of the mean loss of a rank's micro-batches."""
    losses = [nn.functional.mse_loss(model(x.double()), y.double()) for x, y in batches]
    return list(torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters())))


def close(result: dict[str, Tensor], expected: nn.Module, tolerance: float = 1e-5) -> None:
    for name, parameter in expected.named_parameters():
        error = (result[name].double() - parameter).norm() / parameter.norm()
        assert error < tolerance, (name, float(error))


@pytest.mark.parametrize(
    ("name", "accumulation", "clip"),
    [
        ("gradient_0", 1, 0.0),
        ("gradient_1", 1, 0.0),
        ("gradient_2", 1, 0.0),
        ("accumulated", 2, 0.0),
        ("clipped", 1, 0.05),
    ],
)
def test_gradients_are_combined_before_the_step(results: Any, name: str, accumulation: int, clip: float) -> None:
    both = results(name)
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        drawn = slice(step * accumulation, (step + 1) * accumulation)
        own = [gradients(model, rank["drawn"][drawn]) for rank in both]
        for parameter, *pair in zip(model.parameters(), *own, strict=True):
            parameter.grad = adasum(pair)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    close(both[0]["model"], model)


@pytest.mark.parametrize(("name", "every"), [("delta_0", 9), ("delta_1", 9), ("delta_2", 9), ("delta_averaged", 2)])
def test_with_adam_what_the_ranks_did_is_combined(results: Any, name: str, every: int) -> None:
    """After so many steps each the ranks have the mean of their moments."""
    both = results(name)
    model, replicas = network().double(), [network().double() for _ in range(2)]
    optimizers = [torch.optim.AdamW(replica.parameters(), lr=0.01, weight_decay=0.0) for replica in replicas]
    for step in range(6):
        for replica, optimizer, rank in zip(replicas, optimizers, both, strict=True):
            replica.load_state_dict(model.state_dict())
            for parameter, gradient in zip(
                replica.parameters(), gradients(replica, rank["drawn"][step : step + 1]), strict=True
            ):
                parameter.grad = gradient
            optimizer.step()
        with torch.no_grad():
            for parameter, *pair in zip(model.parameters(), *(r.parameters() for r in replicas), strict=True):
                parameter.add_(adasum([each.detach() - parameter for each in pair]))
        states = [optimizer.state.values() for optimizer in optimizers] if step % every == every - 1 else []
        for one, other in zip(*states, strict=True):
            for moment in ("exp_avg", "exp_avg_sq"):
                one[moment].add_(other[moment]).div_(2)
                other[moment].copy_(one[moment])
    close(both[0]["model"], model, 1e-4)


def test_the_combined_step_is_clipped(results: Any) -> None:
    moved = [results("clipped_delta")[0]["model"][name] - value for name, value in network().state_dict().items()]
    assert float(torch.cat([each.flatten() for each in moved]).norm()) == pytest.approx(0.01, rel=1e-4)


def test_every_sample_is_drawn_by_one_rank(results: Any) -> None:
    drawn = torch.cat([x[:, 0] for rank in results("accumulated") for x, _ in rank["drawn"][:8]])
    assert len(set(drawn.tolist())) == len(drawn) == 64


def test_a_checkpoint_loaded_without_its_optimizer_gives_its_weights_in_bf16_too(results: Any) -> None:
    """The fp32 masters, which a step writes into the model, are not in what is loaded."""
    saved, after = (torch.cat([v.flatten() for v in results(name)[0]["model"].values()]) for name in HALF_CASES)
    torch.manual_seed(1)
    first = torch.cat([parameter.flatten() for parameter in network().parameters()])
    assert 0 < (after - saved).norm() < 0.3 * (saved - first).norm()


def test_bf16_learns(results: Any) -> None:
    for name in ("adasum_bf16", "adascale_bf16"):
        losses = [step["loss"] for step in results(name)[0]["seen"]]
        assert sum(losses[-8:]) < sum(losses[:8])


def test_nan_on_one_rank_is_a_step_that_all_skip(results: Any) -> None:
    for name in ("nan_0", "nan_1", "adascale_nan"):
        for rank in results(name):
            assert rank["skipped"] == 1
            assert all(value.isfinite().all() for value in rank["model"].values())
    assert len(results("nan_0")[0]["seen"]) == 7 and results("nan_0")[0]["progress"] == 6


def test_the_loss_scale_of_autocast_falls_on_all_ranks(results: Any) -> None:
    """It begins too high for these losses, and a rank that has seen no NaN lowers it with the others."""
    for name in ("gradient_float16", "delta_float16"):
        skipped = [[batch for batch, seen in enumerate(rank["seen"]) if not seen["applied"]] for rank in results(name)]
        assert skipped[0] == skipped[1] and 2 in skipped[0] and len(skipped[0]) > 1
        assert [rank["skipped"] for rank in results(name)] == [len(skipped[0])] * 2
        assert results(name)[0]["progress"] == 6 and results(name)[0]["seen"][-1]["applied"]


def test_ranks_that_differ_are_one_line(results: Any) -> None:
    for rank in results("differ"):
        assert rank["error"].count("error:") == 1
        assert "the ranks have different values in 1 of 4 parameters, the first of them 2.bias" in rank["error"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("adasum_by_hand", "and the run sees the steps of engine.step() alone"),
        ("adascale_by_hand", "and the run sees the steps of engine.step() alone"),
        ("unstepped", "0.weight has a gradient and is in no exchange"),
        ("one_node", "all ranks are on one node, so they would only be averaged"),
    ],
)
def test_what_the_method_does_not_see_or_cannot_do_is_one_line(results: Any, name: str, line: str) -> None:
    for rank in results(name):
        assert rank["error"].count("error:") == 1 and line in rank["error"]


@pytest.mark.parametrize("method", ["adasum", "adascale"])
def test_a_sparse_gradient_is_one_line(results: Any, method: str) -> None:
    for rank in results(f"sparse_{method}"):
        assert rank["error"].count("error:") == 1
        assert "the gradient of words.weight is sparse: make the layer without sparse=True" in rank["error"]


def test_a_resumed_run_ends_where_the_other_did(results: Any) -> None:
    for whole, resumed in (("straight", "resumed"), ("adascale_scheduled", "adascale_resumed")):
        first, second = results(whole)[0], results(resumed)[0]
        assert len(second["seen"]) < len(first["seen"]) and second["progress"] == first["progress"]
        assert all(torch.equal(first["model"][name], value) for name, value in second["model"].items())


def test_adasum_begins_anew_where_there_is_no_checkpoint(results: Any) -> None:
    """As DeepSpeed, so that a script may load at each start."""
    started, fresh = (results(name)[0]["model"] for name in ("from_nothing", "gradient_0"))
    assert all(torch.equal(started[name], fresh[name]) for name in fresh)


def test_adascale_begins_a_new_run_with_the_module_alone(results: Any) -> None:
    first, warm = (results(name)[0] for name in ("adascale_scheduled", "adascale_warm"))
    assert warm["progress"] >= 24 and warm["seen"][0]["gain"] == 1.0
    assert warm["seen"][0]["rate"] == first["seen"][0]["rate"]
    assert warm["seen"][0]["loss"] != first["seen"][0]["loss"], "the parameters are those of the checkpoint"


@pytest.mark.parametrize(
    ("name", "accumulation", "tolerance"),
    [
        ("adascale_0", 1, 1e-4),
        ("adascale_1", 1, 1e-4),
        ("adascale_2", 1, 1e-4),
        ("adascale_accumulated", 2, 1e-4),
        ("adascale_fp32_sums", 1, 0.1),  # in bf16, with whole fp32 gradients on each rank
        ("adascale_float16", 1, 0.02),  # whose loss scale falls, and whose first steps are skipped for that
    ],
)
def test_the_gain_is_that_of_the_batches_whatever_zero_divides(
    results: Any, name: str, accumulation: int, tolerance: float
) -> None:
    both = results(name)
    model, gain = network().double(), AdaScaleGain(2 * accumulation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, seen in enumerate(both[0]["seen"]):
        if not seen["applied"]:
            continue
        drawn = range(step * accumulation, (step + 1) * accumulation)
        single = [gradients(model, [rank["drawn"][batch]]) for rank in both for batch in drawn]
        stacked = torch.stack([torch.cat([each.flatten() for each in of_batch]) for of_batch in single])
        taken = gain.update(stacked.square().sum(1).tolist(), float(stacked.mean(0).square().sum()))
        assert seen["gain"] == pytest.approx(taken, rel=max(1e-3, tolerance / 4))
        for parameter, *of_batches in zip(model.parameters(), *single, strict=True):
            parameter.grad = torch.stack(of_batches).mean(0)
        optimizer.param_groups[0]["lr"] = 0.1 * taken
        optimizer.step()
    close(both[0]["model"], model, tolerance)
    assert gain.gain > 1.01 and 24 <= gain.scale_invariant_steps < 24 + 2 * accumulation
    assert both[0]["progress"] == pytest.approx(gain.scale_invariant_steps, rel=max(1e-3, tolerance / 4))


def test_the_schedule_follows_scale_invariant_steps(results: Any) -> None:
    seen, progress = results("adascale_scheduled")[0]["seen"], 0.0
    for step in seen:
        progress += step["gain"]
        assert step["rate"] == pytest.approx(0.1 * min(1.0, max(0, int(progress) - 1) / 12), abs=2e-3)


def test_adams_gain_is_of_preconditioned_gradients(results: Any) -> None:
    gains = [step["gain"] for step in results("adascale_adam")[0]["seen"]]
    assert gains[:6] == [1.0] * 6 and 1.0 < gains[-1] <= 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "adasum", "form": "sum"}, "\"form\": Input should be 'gradient', 'delta' or 'auto'"),
        ({"method": "adascale", "scale": 0.5}, '"scale": Input should be greater than or equal to 1'),
        ({"method": "adascale", "form": "delta"}, '"async_training": unknown key "form"'),
        ({"method": "adasum", "sync_state": -1}, '"sync_state": Input should be greater than or equal to 0'),
    ],
)
def test_a_mistake_in_the_section_names_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        configuration.split({"async_training": change}, "file.json")


@pytest.mark.parametrize(("key", "value"), [("island_size", 2), ("max_update_norm_ratio", 10), ("record", True)])
def test_options_of_a_server_are_refused(key: str, value: Any) -> None:
    _, section, options = configuration.split({"async_training": ADASUM | {key: value}}, "file.json")
    with pytest.raises(ConfigurationError, match=f'"{key}" is of no use with method adasum'):
        configuration.check_group(section, options.method, "file.json")


def test_where_to_write_may_be_said_for_whatever_method() -> None:
    _, section, options = configuration.split({"async_training": ADASUM | {"run_dir": "here"}}, "file.json")
    configuration.check_group(section, options.method, "file.json")


@pytest.mark.parametrize(("method", "of_engine"), [("adasum", 8), ("adascale", 16)])
def test_a_batch_is_that_of_all_ranks_as_in_deepspeed(
    monkeypatch: pytest.MonkeyPatch, method: str, of_engine: int
) -> None:
    """In Adasum each of the two ranks is a world of its own to DeepSpeed."""
    initialize: Any = import_module("fairseq_async.deepspeed_plugin.initialize")
    for name in ("_init_distributed", "set_environment_without_launcher", "SingleRankGroups"):
        monkeypatch.setattr(initialize, name, lambda: None)
    monkeypatch.setattr(initialize.dist, "get_world_size", lambda: 2)
    given = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    _, _, options = configuration.split({"async_training": {"method": method}}, "file.json")
    arguments = MagicMock(others={"mpu": None})
    arguments.make_engine.side_effect = InterruptedError
    with pytest.raises(InterruptedError):
        initialize._initialize_synchronous(arguments, options, given)
    assert arguments.make_engine.call_args.args == (given | {"train_batch_size": of_engine},)
