"""Workers of several ranks in FSDP2: each rank holds a part of every parameter, and hands on its part of gradients."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fairseq_async.errors import ConfigurationError
from fairseq_async.pytorch import HybridAsync, brought_state, fsdp
from fairseq_async.worker.start import world
from fairseq_async.worker.start.context import WorkerContext
from tests.helpers.commands import HELPERS, Processes, command
from tests.helpers.plain_loop import STEPS, flat, net
from tests.helpers.run_files import events

pytestmark = pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 has no FSDP2 on a CPU")
Run = Callable[..., list[dict[str, Tensor]]]


@pytest.fixture
def run(processes: Processes, tmp_path: Path) -> Run:
    """``run(ranks, method, precision)``: what each rank has left."""

    def start(ranks: int, method: str, precision: str) -> list[dict[str, Tensor]]:
        out = tmp_path / f"{method}-{ranks}"
        launcher = [command("torchrun"), "--standalone", "--nproc-per-node", ranks]
        if method == "mortal":
            launcher = [
                command("fairseq-async"),
                "launch",
                "--workers",
                2,
                "--ranks-per-worker",
                2,
                "--",
                sys.executable,
            ]
        code, output = processes.run([*launcher, HELPERS / "fsdp_job.py", method, precision, out])
        assert code == 0, output
        return [torch.load(f"{out}-{rank}.pt", weights_only=True) for rank in range(ranks)]

    return start


@pytest.mark.parametrize("precision", ["fp32", "policy"])
def test_one_worker_is_plain_fsdp_on_its_ranks_to_the_bit(run: Run, tmp_path: Path, precision: str) -> None:
    """Also in bf16 by a policy, which leaves the parameters in fp32. The second rank has no row of the last weight."""
    plain = run(2, "plain", precision)
    for each in run(2, "hybrid", precision):
        assert torch.equal(each["model"], plain[0]["model"])
    assert not torch.equal(plain[0]["model"], flat(net()))
    assert all(event["ranks"] == 2 for event in events(tmp_path / "hybrid-2.run"))


def test_local_steps_that_the_server_takes_as_they_are_are_plain_fsdp(run: Run) -> None:
    """θ − (θ − θ′) is θ′ but for rounding."""
    plain = run(2, "plain", "fp32")
    for each in run(2, "local", "fp32"):
        torch.testing.assert_close(each["model"], plain[0]["model"], rtol=0, atol=1e-7)


def test_copies_of_parameters_in_an_optimizer_move_with_the_parameters(run: Run) -> None:
    """Each rank moves its part, also one that has no row of a tensor."""
    plain, copying = run(2, "half", "fp32"), run(2, "copying", "fp32")
    for each in copying:
        torch.testing.assert_close(each["model"], plain[0]["model"], rtol=0, atol=1e-6)


def test_two_workers_with_a_barrier_are_plain_fsdp_on_all_ranks(run: Run) -> None:
    plain, found = run(4, "plain", "fp32"), run(4, "hybrid", "fp32")
    for each in found:
        assert torch.equal(each["model"], found[0]["model"])
        torch.testing.assert_close(each["model"], plain[0]["model"], rtol=0, atol=1e-6)
    assert torch.equal(found[0]["server"], found[1]["server"])  # whole, in the middle of the run


def test_parameters_in_bf16_are_rounded_from_the_servers(run: Run) -> None:
    first, second = run(2, "hybrid", "bf16")
    assert torch.equal(first["model"], second["model"])
    assert torch.equal(first["model"], first["model"].bfloat16().float())
    assert (first["model"] - flat(net())).abs().max() > 0.05  # of 12 steps of 0.01


def test_a_worker_whose_rank_is_killed_comes_back_and_the_finished_model_is_whole(
    run: Run, tmp_path: Path, processes: Processes
) -> None:
    found = run(4, "mortal", "fp32")
    assert (tmp_path / "mortal-4.died").exists()
    assert {event["worker"] for event in events(tmp_path / "mortal-4.run")} == {0, 1}
    for each in found:
        assert torch.equal(each["model"], found[0]["model"])
    export = [command("fairseq-async"), "export", tmp_path / "mortal-4.run", tmp_path / "model.safetensors"]
    code, output = processes.run(export)
    assert code == 0, output


@pytest.fixture
def alone() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_is_not_divided_by_rows_among_the_ranks_of_a_worker_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, without_root, stepped = fully_shard(net()), net(), fully_shard(net())
    fully_shard(without_root[0])  # type: ignore[index]
    made: list[tuple[nn.Module, int, str]] = [
        (whole, 1, "the model is in fully_shard, whose ranks wait for each other: unwrap it, and call"),
        (whole, 2, "0.weight is a DTensor that is not divided by its rows among the 2 ranks of this worker"),
        (without_root, 1, "2.weight is in no module of fully_shard, and no rank would have the mean of its gradients"),
    ]
    for model, ranks, message in made:
        if ranks == 2:
            monkeypatch.setattr(world, "_entered", [WorkerContext(0, 1, rank=0, island_size=2)])
        if model is without_root:
            with pytest.raises(ConfigurationError, match=message):
                fsdp.check_divided(list(model.named_parameters()), ranks)
            continue
        with pytest.raises(SystemExit) as ended:
            HybridAsync(model, torch.optim.SGD(model.parameters()), total_steps=STEPS)
        assert ended.value.code == 2 and message in capfd.readouterr().err
    optimizer = torch.optim.Adam(stepped.parameters())
    stepped(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    assert any(isinstance(each, DTensor) for each in optimizer.state)
    spec: Any = type("Spec", (), {"server": type("Server", (), {"shards": 1})})
    with pytest.raises(ConfigurationError, match="each rank has a part of its moments"):
        brought_state.check_brought(spec, [optimizer])


@pytest.mark.parametrize(("rows", "starts"), [(6, [0, 4, 8]), (5, [0, 4, 8]), (4, [0, 4, 8]), (2, [0, 2, 4])])
def test_a_rank_holds_as_many_rows_as_chunk_gives_it(rows: int, starts: list[int]) -> None:
    """Of three ranks; a row has two elements."""
    assert [sum(part.numel() for part in torch.ones(rows, 2).chunk(3)[:rank]) for rank in range(3)] == starts
    for rank, start in enumerate(starts):
        mesh = MagicMock(**{"get_local_rank.return_value": rank, "size.return_value": 3})
        assert fsdp._start(MagicMock(spec=DTensor, shape=torch.Size([rows, 2]), device_mesh=mesh)) == start
