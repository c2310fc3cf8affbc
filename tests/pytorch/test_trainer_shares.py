"""Shares by speed in the Trainer, without and with DeepSpeed: a step is that of a synchronous run."""

from math import inf
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from fairseq_async.pytorch.trainer.dealt import DealtBatches, can_be_dealt
from tests.helpers.commands import DEEPSPEED, HELPERS, ROOT, Processes, command
from tests.helpers.sines import BATCH, CLIP, RATE, SAVED_AT, UNUSED, Net, Sines
from tests.helpers.stand_ins import Position

PATH = f"{HELPERS / 'without_fairseq'}:{ROOT}"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``tests/helpers/hf_shares.py`` has left."""
    path = tmp_path_factory.mktemp("shares")
    with Processes() as processes:
        processes.run([command("python"), "-m", "tests.helpers.hf_shares", path], seconds=500, **DEEPSPEED)
    return path


def left(out: Path, name: str, ranks: int = 2) -> list[dict[str, Any]]:
    logs = (out / f"{name}.log").read_text()[-3000:]
    assert all((out / f"{name}-{rank}.pt").exists() for rank in range(ranks)), logs
    return [torch.load(out / f"{name}-{rank}.pt", weights_only=True) for rank in range(ranks)]


def synchronous(workers: list[dict[str, Any]], by_tokens: bool, clip: float = inf, parts: int = 0) -> Tensor:
    """Where a run in float64 ends that takes the same samples in the same steps, as a mean of micro-batches or of so
    many sums of them."""
    net, data = Net().double(), Sines()
    optimizer = SGD(net.parameters(), lr=RATE, momentum=0.9)
    for step in zip(*(each["samples"][:-1] for each in workers), strict=True):
        optimizer.zero_grad()
        chosen = [number for each in step for number in each]
        batches = [chosen] if by_tokens else [chosen[at : at + BATCH] for at in range(0, len(chosen), BATCH)]
        for batch in batches:
            inputs, labels = (torch.stack([data[number][key] for number in batch]) for key in ("inputs", "labels"))
            (net.total(inputs.double(), labels) / (labels != UNUSED).sum() / (parts or len(batches))).backward()
        assert nn.utils.clip_grad_norm_(net.parameters(), clip) > clip or clip == inf, "it shows nothing otherwise"
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def numbers(workers: list[dict[str, Any]]) -> list[list[int]]:
    """How many micro-batches the steps of each worker had."""
    return [[len(step) // BATCH for step in each["samples"][:-1]] for each in workers]


def are_passes(workers: list[dict[str, Any]], steps: int = 3) -> bool:
    """Whether all workers together have each sample once in their first ``steps``, and again in all further ones."""
    passes = [range(first, first + steps) for first in range(0, 6, steps)]
    parts = [sum((each["samples"][at] for each in workers for at in some), []) for some in passes]
    return all(sorted(part) == list(range(len(Sines()))) for part in parts)


@pytest.mark.parametrize("name", ["whole", "tokens", "clipped", "shuffled", "deepspeed", "deepspeed, tokens"])
def test_a_step_is_that_of_a_synchronous_run(out: Path, name: str) -> None:
    """Of the same samples, whatever the shares; and an epoch is a pass of both workers together."""
    ended = left(out, name)
    assert numbers(ended) == [[4, 6, 6, 6, 6, 6], [4, 2, 2, 2, 2, 2]]
    assert are_passes(ended)
    expected = synchronous(ended, by_tokens="tokens" in name, clip=CLIP if name == "clipped" else inf)
    for each in ended:
        torch.testing.assert_close(each["parameters"].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "parts"), [("means, summed", 2), ("means, divided", 8)])
def test_gradients_of_a_loss_that_is_no_mean_over_the_steps_tokens_do_not_weigh_by_them(
    out: Path, name: str, parts: int
) -> None:
    """A synchronous Trainer averages over its ranks, which by itself add up the means of their micro-batches."""
    ended = left(out, name)
    assert numbers(ended) == [[4, 6, 6, 6, 6, 6], [4, 2, 2, 2, 2, 2]]
    expected = synchronous(ended, by_tokens=False, parts=parts)
    for each in ended:
        torch.testing.assert_close(each["parameters"].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["whole", "tokens", "deepspeed", "deepspeed, tokens"])
def test_the_loss_in_the_log_is_that_of_the_steps_own_micro_batches(out: Path, name: str) -> None:
    ended = left(out, name)[0]
    logged = [line["loss"] for line in ended["log"] if "loss" in line]
    mean = sum if "tokens" in name else fmean
    assert logged == pytest.approx([mean(step) for step in ended["losses"][:-1]], abs=1e-4)


@pytest.mark.parametrize("name", ["ragged", "ragged, tokens"])
def test_the_last_step_of_a_pass_is_of_what_is_left_of_it(out: Path, name: str) -> None:
    """A worker that nothing is left for computes a gradient without weight."""
    ended = left(out, name)
    assert numbers(ended) == [[5, 8, 4, 8, 8, 4], [5, 2, 1, 2, 2, 1]]
    for number in (2, 5):
        ended[1]["samples"][number] = []
    assert are_passes(ended)
    expected = synchronous(ended, by_tokens="tokens" in name)
    for each in ended:
        torch.testing.assert_close(each["parameters"].double(), expected, rtol=1e-6, atol=1e-6)


def test_the_ranks_of_a_worker_have_as_many_micro_batches_each(out: Path) -> None:
    ended = left(out, "deepspeed, islands", 4)
    assert numbers(ended) == [[4, 4, 6, 4, 6, 4]] * 2 + [[4, 1, 2, 1, 2, 1]] * 2
    for each in ended[2:]:
        each["samples"][1::2] = [[], [], []]
    assert are_passes(ended, 2)
    expected = synchronous(ended, by_tokens=False)
    for each in ended:
        torch.testing.assert_close(each["parameters"].double(), expected, rtol=1e-6, atol=1e-6)


def test_processes_that_read_ahead_read_what_is_dealt(out: Path) -> None:
    for ours, theirs in zip(left(out, "shuffled, read by processes"), left(out, "shuffled"), strict=True):
        assert ours["samples"] == theirs["samples"] and torch.equal(ours["parameters"], theirs["parameters"])


def test_a_script_that_divides_the_data_draws_from_each_part(out: Path) -> None:
    """An epoch is a pass over a worker's twelve batches, whose last step has what is left of them."""
    ended = left(out, "divided by the script")
    assert numbers(ended) == [[4, 6, 2, 6, 6, 6], [4, 2, 2, 2, 2, 2]]
    assert sorted(sum(ended[0]["samples"][:3] + ended[1]["samples"][:5], [])) == list(range(len(Sines())))
    expected = synchronous(ended, by_tokens=False)
    for each in ended:
        torch.testing.assert_close(each["parameters"].double(), expected, rtol=1e-6, atol=1e-6)


def test_data_without_a_length_have_no_step_that_ends_early(out: Path) -> None:
    """But for the one where the Trainer takes its epoch to end, after as many batches as the run has steps of four."""
    ended = left(out, "endless")
    assert numbers(ended) == [[4, 6, 6, 6, 2, 6], [4, 2, 2, 2, 2, 2]]
    for each in ended:
        expected = synchronous(ended, by_tokens=False)
        torch.testing.assert_close(each["parameters"].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["whole", "divided by the script", "deepspeed"])
def test_a_run_that_goes_on_draws_what_it_would_have_drawn(out: Path, name: str) -> None:
    """With its own parts each worker goes on in an epoch of its own: the first has had all of its data after three
    steps, the second two thirds."""
    resumed = left(out, "resumed" if name == "whole" else f"{name}, resumed")
    for whole, again in zip(left(out, name), resumed, strict=True):
        assert again["samples"] == whole["samples"][SAVED_AT:]
        assert torch.equal(again["parameters"], whole["parameters"])


@pytest.mark.parametrize(("name", "last"), [("", 4), ("ragged, ", 2)])
def test_equal_shares_change_no_bit(out: Path, name: str, last: int) -> None:
    for ours, theirs in zip(left(out, f"{name}equal shares"), left(out, f"{name}equal"), strict=True):
        assert ours["samples"] == theirs["samples"] and len(ours["samples"][2]) == last * BATCH
        assert torch.equal(ours["parameters"], theirs["parameters"])


@pytest.mark.parametrize("name", ["by default", "deepspeed, by default"])
def test_shares_are_the_default_of_a_trainer_that_accumulates(out: Path, name: str) -> None:
    """Without a barrier, so that the second worker may come too late to have a part."""
    first, _ = left(out, name)
    assert [len(step) // BATCH for step in first["samples"][:2]] == [4, 6]


@pytest.mark.parametrize("name", ["counting", "deepspeed, counting"])
def test_a_script_that_counts_micro_batches_itself_has_equal_shares(out: Path, name: str) -> None:
    """Its losses are divided by the average number, whatever the number of its step."""
    first, _ = left(out, name)
    assert [len(step) // BATCH for step in first["samples"][:2]] == [4, 4]
    said = (out / f"{name}, auto.log").read_text()
    assert "Counting.compute_loss reads args.gradient_accumulation_steps" in said and "Traceback" not in said


def test_a_share_is_dealt_whole_again_after_a_step_that_was_skipped() -> None:
    """In half precision, or of a pass's last step, of whose four batches two workers have one and none."""
    loader = prepare_data_loader(DataLoader(range(20), batch_size=2), None, 2, 0)  # type: ignore[arg-type]
    assert can_be_dealt(loader, workers=2)
    for first, share in ((0, 4), (8, 4), (8, 6), (9, 3)):
        worker: Any = Position(sequence=1, first_micro_batch=first, micro_batches=share)
        worker.client, worker.empty = SimpleNamespace(workers=2), 0
        dealt, drawn = DealtBatches(loader, worker, 4), list[int]()
        for _ in range(5):
            batches, stands_in = dealt.draw()
            assert worker.micro_batches + worker.empty == share
            assert len(batches) == (1 if stands_in else worker.micro_batches)
            drawn.append(worker.empty)
        assert len({*drawn}) == 2, "passes end, and others begin"


class DrawnAnew(Dataset[int]):
    """Has other samples in each pass."""

    number = 0

    def set_epoch(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index >= len(self):
            raise IndexError
        return 100 * self.number + index


def test_data_that_are_drawn_anew_in_each_pass_are_dealt_so() -> None:
    loader = prepare_data_loader(DataLoader(DrawnAnew(), batch_size=2), None, 2, 0)
    worker: Any = Position(first_micro_batch=0, micro_batches=10)
    worker.client, worker.empty = SimpleNamespace(workers=2), 0
    dealt = DealtBatches(loader, worker, 5)
    for number in range(3):
        worker.sequence, worker.first_micro_batch, worker.micro_batches = number, 10 * number, 10
        batches, _ = dealt.draw()
        assert sorted(torch.cat(batches).tolist()) == list(range(100 * number, 100 * number + 20))


@pytest.mark.parametrize(
    ("processes", "workers", "prepared", "shuffled", "can_be"),
    [
        (2, 2, {}, False, True),
        (4, 2, {"use_seedable_sampler": True}, True, True),
        (2, 2, {}, True, False),  # another order on each worker
        (3, 2, {}, False, False),
        (2, 2, {"even_batches": False}, False, False),
    ],
)
def test_batches_can_be_dealt_where_all_workers_know_them_and_have_equally_many(
    processes: int, workers: int, prepared: dict[str, bool], shuffled: bool, can_be: bool
) -> None:
    loader = prepare_data_loader(
        DataLoader(range(20), batch_size=2, shuffle=shuffled),  # type: ignore[arg-type]
        num_processes=processes,
        process_index=0,
        **prepared,
    )
    assert can_be_dealt(loader, workers) is can_be and not can_be_dealt(loader.dataset, workers)
