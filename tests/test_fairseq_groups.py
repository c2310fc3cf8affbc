"""``--optimizer adasum`` and ``adascale`` in fairseq's own data-parallel group."""

import copy
import json
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train
from torch import Tensor, nn
from torch.nn import Parameter

import fairseq_async.fairseq_plugin  # noqa: F401
from fairseq_async.algorithms import adasum
from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin import adasum as plugin
from fairseq_async.fairseq_plugin import group_session
from fairseq_async.fairseq_plugin.adascale import AdaScaleTrainer
from fairseq_async.fairseq_plugin.adasum import AdasumOptimizer, AdasumTrainer
from tests.conftest import MODEL, PACKAGE, Processes, command, load, relative_differences

SECONDS = 200
SGD = ["--inner-optimizer", "sgd", "--lr", "0.5", "--dropout", "0"]
ADAM = ["--inner-optimizer", "adam", "--adam-betas", "(0.9, 0.98)"]
ADASUM = ["--optimizer", "adasum"]
ADASCALE = ["--optimizer", "adascale"]


@dataclass
class Job:
    ranks: int
    flags: list[object]
    spoil: str = ""
    goes_on: str = ""  # with the checkpoint of another job
    path: Path = field(default=Path(), init=False)  # without an ending

    def log(self, rank: int = 0) -> str:
        return Path(f"{self.path}-{rank}.log").read_text()

    def code(self, rank: int = 0) -> int:
        return int(self.log(rank).split()[-1])

    def error(self, rank: int = 0) -> str:
        (line,) = [line for line in self.log(rank).splitlines() if "error: " in line]
        assert self.code(rank) == 2 and "Traceback" not in self.log(rank)
        return line

    def steps(self) -> list[dict[str, float]]:
        """What fairseq has logged of each step."""
        found = [line for line in self.log().splitlines() if line.startswith('{"epoch"') and '"update"' in line]
        return [{name: float(value) for name, value in json.loads(line).items()} for line in found]

    @property
    def checkpoint(self) -> Path:
        return self.path.with_suffix(".pt")


JOBS = {
    "adam_straight": Job(2, [*ADASUM, *ADAM, "--max-update", 26]),
    "adam_first_part": Job(2, [*ADASUM, *ADAM, "--max-update", 17]),
    "adam_second_part": Job(2, [*ADASUM, *ADAM, "--max-update", 26], goes_on="adam_first_part"),
    "adam_synchronised": Job(2, [*ADASUM, *ADAM, "--max-update", 8, "--adasum-sync-state", 4]),
    "sgd_gradient": Job(2, [*ADASUM, *SGD, "--clip-norm", 0, "--max-update", 14]),
    "sgd_delta": Job(2, [*ADASUM, *SGD, "--clip-norm", 0, "--max-update", 14, "--adasum-form", "delta"]),
    "lamb": Job(2, [*ADASUM, "--inner-optimizer", "lamb", "--max-update", 60, "--update-freq", 2, "--lr", "2e-2"]),
    "nan": Job(2, [*ADASUM, *SGD, "--bf16", "--max-update", 12], spoil="nan"),
    "nan_delta": Job(2, [*ADASUM, *ADAM, "--max-update", 6], spoil="nan"),
    "different": Job(2, [*ADASUM, *SGD, "--max-update", 4], spoil="parameters"),
    "one_node": Job(2, [*ADASUM, *SGD, "--max-update", 4, "--adasum-hierarchy", "node"]),
    "by_ranks": Job(2, [*ADASCALE, *SGD, "--max-update", 20]),
    "by_accumulation": Job(1, [*ADASCALE, *SGD, "--max-update", 20, "--update-freq", 2]),
    "scale_one": Job(1, [*ADASCALE, *SGD, "--max-update", 12, "--update-freq", 2, "--adascale-scale", 1]),
    "plain": Job(1, ["--optimizer", "sgd", *SGD[2:], "--max-update", 12, "--update-freq", 2]),
    "momentum_straight": Job(1, [*ADASCALE, *SGD, "--momentum", "0.9", "--max-update", 40, "--update-freq", 4]),
    "momentum_first_part": Job(1, [*ADASCALE, *SGD, "--momentum", "0.9", "--max-update", 20, "--update-freq", 4]),
    "momentum_second_part": Job(
        1, [*ADASCALE, *SGD, "--momentum", "0.9", "--max-update", 40, "--update-freq", 4], goes_on="momentum_first_part"
    ),
    "other_scale": Job(
        2, [*ADASCALE, *SGD, "--momentum", "0.9", "--max-update", 60, "--update-freq", 1], goes_on="momentum_first_part"
    ),
    "adam_bf16": Job(1, [*ADASCALE, *ADAM, "--bf16", "--max-update", 40, "--update-freq", 4]),
    "differences": Job(
        1, [*ADASCALE, *SGD, "--max-update", 20, "--adascale-scale", 4, "--adascale-estimator", "differences"]
    ),
    "every_other": Job(1, [*ADASCALE, *SGD, "--max-update", 6, "--update-freq", 2, "--adascale-interval", 2]),
    "summed": Job(1, [*ADASCALE, *SGD, "--max-update", 6, "--update-freq", 2], spoil="summed"),
}


@pytest.fixture(scope="module")
def jobs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("jobs")
    written = []
    for name, job in JOBS.items():
        job.path, saved = folder / name, folder / (job.goes_on or name)
        flags = [data, *MODEL, "--user-dir", PACKAGE, "--save-dir", saved, "--log-interval", 1, *job.flags]
        written.append({"name": name, "ranks": job.ranks, "spoil": job.spoil, "flags": [str(flag) for flag in flags]})
    (folder / "jobs.json").write_text(json.dumps(written))
    processes, script = Processes(), Path(__file__).parent / "fairseq_ranks.py"
    root = str(PACKAGE.parent)
    try:
        ranks = [
            processes.start([sys.executable, script, folder / "jobs.json", rank], PYTHONPATH=root) for rank in (0, 1)
        ]
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        processes.end()
    assert JOBS[list(JOBS)[-1]].log().endswith("exit code 0\n"), outputs
    return JOBS


def checkpoint_differences(jobs: dict[str, Job], left: str, right: str) -> float:
    """The largest of the tensors', but for a key's bias, whose gradient is rounding noise."""
    differences = relative_differences(jobs[left].checkpoint, jobs[right].checkpoint)
    return max(value for name, value in differences.items() if not name.endswith("k_proj.bias"))


# Adasum


def test_stopping_and_going_on_in_the_delta_form_changes_no_bit(jobs: dict[str, Job]) -> None:
    """Each rank goes on with its own moments; the stop falls into the middle of the second epoch."""
    straight, parts = (load(jobs[name].checkpoint) for name in ("adam_straight", "adam_second_part"))
    differences = relative_differences(jobs["adam_straight"].checkpoint, jobs["adam_second_part"].checkpoint)
    assert set(differences.values()) == {0.0}
    for state in (straight, parts):
        assert state["optimizer_history"][-1]["num_updates"] == 26
        (other,) = state["last_optimizer_state"]["adasum"]["ranks"]
        assert not torch.equal(other[0]["exp_avg"], state["last_optimizer_state"]["state"][0]["exp_avg"])


def test_states_that_were_just_averaged_are_equal(jobs: dict[str, Job]) -> None:
    state = load(jobs["adam_synchronised"].checkpoint)["last_optimizer_state"]
    (other,) = state["adasum"]["ranks"]
    assert all(torch.equal(other[i]["exp_avg_sq"], own["exp_avg_sq"]) for i, own in state["state"].items())


def test_for_plain_sgd_both_forms_are_one(jobs: dict[str, Job]) -> None:
    """A step is then −lr times the gradient, and Adasum of multiples is the multiple of Adasum. 14 steps reach into the
    second epoch; the first ends with a batch for one rank only."""
    assert checkpoint_differences(jobs, "sgd_gradient", "sgd_delta") < 1e-5
    assert checkpoint_differences(jobs, "sgd_gradient", "nan") > 1e-3  # and it is no constant


def test_lamb_learns_with_accumulation(jobs: dict[str, Job]) -> None:
    losses = [step["loss"] for step in jobs["lamb"].steps()]
    assert losses[-1] < losses[0] - 0.5


def test_all_ranks_skip_a_step_with_nan_together(jobs: dict[str, Job]) -> None:
    for name, updates in (("nan", 12), ("nan_delta", 6)):
        job = jobs[name]
        for rank in (0, 1):
            assert job.code(rank) == 0
            assert job.log(rank).count("all ranks skip this step") == 1
        state = load(job.checkpoint)
        assert all(tensor.isfinite().all() for tensor in state["model"].values())
        assert state["optimizer_history"][-1]["num_updates"] == updates


def test_parameters_that_differ_are_found_before_the_first_step(jobs: dict[str, Job]) -> None:
    for rank in (0, 1):
        assert "different values in 1 of" in jobs["different"].error(rank)
        assert "decoder.layers.0.fc2.bias" in jobs["different"].error(rank)


def test_a_hierarchy_of_one_node_is_refused(jobs: dict[str, Job]) -> None:
    assert "all ranks are on one node, so they would only be averaged" in jobs["one_node"].error()


class Together:
    """Ranks as threads of this process, with Adasum by its reference."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.rank = ranks, threading.local()
        self._barrier, self._given = threading.Barrier(ranks, timeout=60), [[Tensor()]] * ranks

    def exchange(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        self._given[self.rank.number] = [tensor.clone() for tensor in tensors]
        self._barrier.wait()
        everyones = list(self._given)
        self._barrier.wait()
        return everyones

    def combine(self, tensors: Sequence[Tensor]) -> None:
        for index, of_ranks in enumerate(zip(*self.exchange(tensors), strict=True)):
            tensors[index].copy_(adasum(of_ranks))

    def all_reduce(self, tensor: Tensor, group: Any = None) -> None:
        tensor.copy_(sum(given for (given,) in self.exchange([tensor])))

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.ranks

        def thread(rank: int) -> None:
            self.rank.number = rank
            results[rank] = work(rank)

        threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(self.ranks)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return results


def parsed(monkeypatch: pytest.MonkeyPatch, *flags: object) -> Any:
    arguments = ["data", *MODEL, *map(str, flags)]
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *arguments])
    args = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), arguments)
    return convert_namespace_to_omegaconf(args)


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in ((4, 3), (4,))]


def trained(together: Together, cfg: Any, start: nn.Module, tokens: Sequence[float], steps: int) -> list[Tensor]:
    """What two ranks come to, calling the optimizer as fairseq's trainer does; the norm is clipped to 1."""

    def work(rank: int) -> list[Tensor]:
        model = copy.deepcopy(start)
        method = AdasumOptimizer(cfg.optimizer, model.parameters())
        method.combine = together.combine
        for step in range(steps):
            for parameter, gradient in zip(model.parameters(), gradients(rank, step), strict=True):
                parameter.grad = gradient * tokens[rank]
            method.share = sum(tokens) / 2 / tokens[rank]
            method.all_reduce_grads(model)
            method.multiply_grads(2 / sum(tokens))
            method.clip_grad_norm(1.0)
            method.step()
        return list(model.parameters())

    first, second = together.run(work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return first


def test_the_gradient_form_is_the_adasum_of_the_mean_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against momentum-SGD in double precision: sums over 5 and 3 tokens, clipped after they are combined."""
    cfg = parsed(monkeypatch, *ADASUM, "--inner-optimizer", "sgd", "--momentum", "0.9", "--lr", "0.1")
    torch.manual_seed(5)
    start = nn.Linear(3, 4)
    result = trained(Together(2), cfg, start, (5.0, 3.0), 3)
    expected = copy.deepcopy(start).double()
    sgd = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        pairs = zip(gradients(0, step), gradients(1, step), strict=True)
        for parameter, pair in zip(expected.parameters(), pairs, strict=True):
            parameter.grad = adasum([gradient.double() for gradient in pair])
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        sgd.step()
    for tensor, parameter in zip(result, expected.parameters(), strict=True):
        assert torch.allclose(tensor.double(), parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_the_delta_form_is_the_adasum_of_the_steps_of_the_ranks(monkeypatch: pytest.MonkeyPatch, clip: float) -> None:
    """Against Adam in double precision: sums over 5 and 3 tokens, clipped by the mean square norm."""
    together, tokens, steps = Together(2), (5.0, 3.0), 3
    monkeypatch.setattr(plugin.dist, "all_reduce", together.all_reduce)
    cfg = parsed(monkeypatch, *ADASUM, *ADAM, "--lr", "0.02", "--adasum-clip-delta", clip)
    torch.manual_seed(5)
    start = nn.Linear(3, 4)
    first = trained(together, cfg, start, tokens, steps)
    now = [parameter.detach().double() for parameter in start.parameters()]
    replicas = [[Parameter(tensor.clone()) for tensor in now] for _ in range(2)]
    adams = [torch.optim.Adam(replica, lr=0.02, betas=(0.9, 0.98), eps=1e-8) for replica in replicas]
    for step in range(steps):
        own = [[gradient.double() for gradient in gradients(rank, step)] for rank in range(2)]
        norm = math.sqrt(sum(float(g.square().sum()) for of_rank in own for g in of_rank) / 2)
        for replica, adam, of_rank in zip(replicas, adams, own, strict=True):
            for parameter, tensor, gradient in zip(replica, now, of_rank, strict=True):
                parameter.data.copy_(tensor)
                parameter.grad = gradient * min(1.0, 1.0 / norm)
            adam.step()
        deltas = [adasum([r[i].detach() - tensor for r in replicas]) for i, tensor in enumerate(now)]
        length = math.sqrt(sum(float(delta.square().sum()) for delta in deltas))
        factor = min(1.0, clip / length) if clip else 1.0
        now = [tensor + factor * delta for tensor, delta in zip(now, deltas, strict=True)]
    for result, expected in zip(first, now, strict=True):
        assert torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*ADASUM, "--adasum-form", "sum"], "--optimizer adasum: --adasum-form: Input should be 'gradient'"),
        ([*ADASUM, *SGD, "--adasum-sync-state", 5], "sync_state is of the delta form, and --inner-optimizer sgd has"),
        ([*ADASUM, "--fp16", "--cpu"], "--fp16: fairseq needs a GPU for it"),
        (
            [*ADASUM, "--memory-efficient-bf16", "--cpu"],
            "--memory-efficient-bf16: not possible with",
        ),
        (
            [*ADASUM, "--ddp-backend", "pytorch_ddp"],
            "pytorch_ddp: leave it out; adasum reduces itself",
        ),
        ([*ADASUM], "--optimizer adasum combines the gradients of several ranks, and this run has one"),
        ([*ADASCALE, *SGD], "adascale compares the gradients of a step's batches, and this step has one"),
        ([*ADASCALE, *SGD, "--adascale-scale", 0.5], "--adascale-scale: Input should be greater than or equal to 1"),
        ([*ADASCALE, *SGD, "--adascale-scale", "nan"], "--adascale-scale: Input should be"),
        (
            [*ADASCALE, "--update-freq", "2", "--ddp-backend", "fully_sharded"],
            "--ddp-backend fully_sharded: not possible",
        ),
        ([*ADASCALE, "--update-freq", "2", "--zero-sharding", "os"], "--zero-sharding os: not possible with"),
        ([*ADASCALE, "--update-freq", "2,4", "--adascale-scale", 8], "--adascale-scale with several --update-freq"),
        ([*ADASCALE, "--update-freq", "2", "--adascale-estimator", "differences"], "and this step has 2"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, flags: list[object], message: str
) -> None:
    cfg = parsed(monkeypatch, *flags)
    trainer = AdasumTrainer if "adasum" in flags else AdaScaleTrainer
    with pytest.raises(ConfigurationError) as caught:
        trainer.check(cfg)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_flags_that_fairseq_would_act_upon_first_are_refused_while_it_parses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        (["--inner-optimizer", "adafactor"], "--inner-optimizer adafactor: adascale has adam, nag, sgd"),
        (["--cpu", "--distributed-world-size", 2], "is 2, and the number of processes that were started is 1: leave"),
    ):
        with pytest.raises(SystemExit):
            parsed(monkeypatch, *ADASCALE, *flags)
        assert message in capsys.readouterr().err


def test_fairseqs_spawn_can_send_our_main_to_the_processes_that_it_starts() -> None:
    ours = group_session.Main(train, train.main)
    assert pickle.loads(pickle.dumps(ours)).module is train


@pytest.mark.parametrize("launcher", ["torchrun", "launch"])
def test_the_ranks_are_started_by(processes: Processes, data: Path, tmp_path: Path, launcher: str) -> None:
    flags = [data, *MODEL, "--save-dir", tmp_path, "--max-update", 8]
    if launcher == "torchrun":
        start = [command("torchrun"), "--standalone", "--nproc-per-node", 2, command("fairseq-train")]
        code, output = processes.run([*start, *flags, "--user-dir", PACKAGE, *ADASCALE, *SGD])
    else:
        start = [command("fairseq-async"), "launch", "--workers", 2, "--", "fairseq-train"]
        code, output = processes.run([*start, *flags, *ADASUM, *ADAM])
        assert (tmp_path / "logs" / "worker-1.log").exists()
    assert code == 0, output[-3000:]
    assert load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] >= 8


def test_a_rank_that_dies_ends_the_run(processes: Processes, data: Path, tmp_path: Path) -> None:
    start = [command("fairseq-async"), "launch", "--workers", 2, "--", "fairseq-train", data, *MODEL, *ADASUM, *ADAM]
    launcher = processes.start([*start, "--save-dir", tmp_path, "--max-update", 1000000, "--disable-validation"])
    log = tmp_path / "logs" / "worker-0.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and '"num_updates": "10"' in log.read_text()):
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.1)
    victim = next(
        pid for pid in children(launcher.pid) if b"LOCAL_RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    )
    os.kill(victim, signal.SIGKILL)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 1 and "worker 1 was killed by SIGKILL" in output
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(tmp_path) in _line(pid)]


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


# AdaScale


def test_the_gain_is_the_same_from_ranks_and_from_accumulation(jobs: dict[str, Job]) -> None:
    """Two ranks draw what one draws in two micro-batches. The end of an epoch has an odd batch."""
    ranks, accumulation = jobs["by_ranks"].steps(), jobs["by_accumulation"].steps()
    assert len(ranks) == len(accumulation) > 5
    for a, b in zip(ranks, accumulation, strict=True):
        for name in ("gain", "variance", "square_mean", "num_updates"):
            assert a[name] == pytest.approx(b[name], rel=2e-3), (a, b)
    assert checkpoint_differences(jobs, "by_ranks", "by_accumulation") < 1e-4
    assert all(1.0 <= step["gain"] <= 2.0 for step in ranks) and ranks[-1]["gain"] > 1.01


def test_with_a_scale_of_one_it_is_plain_sgd(jobs: dict[str, Job]) -> None:
    differences = relative_differences(jobs["scale_one"].checkpoint, jobs["plain"].checkpoint)
    assert set(differences.values()) == {0.0}


def test_schedule_and_end_are_by_scale_invariant_steps(jobs: dict[str, Job]) -> None:
    steps = jobs["momentum_straight"].steps()
    state = load(jobs["momentum_straight"].checkpoint)
    statistics = state["last_optimizer_state"]["adascale"]
    assert 40 <= statistics["whole"]["scale_invariant_steps"] < 44
    assert statistics["steps"] == len(steps) < 38
    for step in steps:
        updates = step["num_updates"]
        expected = 0.5 * min(updates / 20, (20 / max(updates, 1)) ** 0.5)  # inverse_sqrt, warm-up of 20
        assert step["lr"] == pytest.approx(expected, rel=1e-4)
        assert {"gain", "noise_scale", "variance", "square_mean", "scale", "iterations"} <= step.keys()


def test_a_resumed_run_goes_on_with_the_averages(jobs: dict[str, Job]) -> None:
    differences = relative_differences(jobs["momentum_straight"].checkpoint, jobs["momentum_second_part"].checkpoint)
    assert set(differences.values()) == {0.0}
    states = [load(jobs[name].checkpoint) for name in ("momentum_straight", "momentum_second_part")]
    assert states[0]["last_optimizer_state"]["adascale"] == states[1]["last_optimizer_state"]["adascale"]


def test_a_run_goes_on_with_another_scale(jobs: dict[str, Job]) -> None:
    steps = jobs["other_scale"].steps()
    before = load(jobs["momentum_second_part"].checkpoint)["last_optimizer_state"]["adascale"]
    after = load(jobs["other_scale"].checkpoint)["last_optimizer_state"]["adascale"]
    assert steps[0]["scale"] == 2.0 and steps[-1]["num_updates"] >= 60
    assert after["steps"] == before["steps"] + len(steps) and after["whole"]["estimates"] > before["whole"]["estimates"]


def test_adam_with_bf16_and_the_differences_of_one_rank_have_a_gain(jobs: dict[str, Job]) -> None:
    for name in ("adam_bf16", "differences"):
        steps = jobs[name].steps()
        assert 1.0 < max(step["gain"] for step in steps) <= 4.0
        assert steps[-1]["loss"] < steps[0]["loss"]


def test_a_loss_that_is_summed_before_backward_gives_a_warning(jobs: dict[str, Job]) -> None:
    assert jobs["summed"].log().count("saw 1 backward passes for 2 batches") == 1
    assert "backward passes for" not in jobs["by_accumulation"].log() + jobs["every_other"].log()
