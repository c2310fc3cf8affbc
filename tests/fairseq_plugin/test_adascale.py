"""``--optimizer adascale`` in runs of one and two ranks."""

from pathlib import Path

import pytest

from tests.helpers.fairseq_jobs import ADAM, ADASCALE, SGD, Job, checkpoint_differences, run_jobs
from tests.helpers.run_files import load, relative_differences

JOBS = {
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
    "parts": Job(1, [*ADASCALE, *SGD, "--max-update", 6, "--update-freq", 2], spoil="parts"),
}


@pytest.fixture(scope="module")
def jobs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return run_jobs(JOBS, data, tmp_path_factory.mktemp("jobs"))


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


def test_several_backward_passes_for_a_batch_are_refused(jobs: dict[str, Job]) -> None:
    """The passes of two languages differ by more than noise, and a step of two batches would count as one of four."""
    assert "adascale saw 4 backward passes for 2 batches: --task translation calls" in jobs["parts"].error()
