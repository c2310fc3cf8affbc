"""``--optimizer adasum`` in runs of two ranks."""

from pathlib import Path

import pytest
import torch

from tests.helpers.fairseq_jobs import ADAM, ADASUM, SGD, Job, checkpoint_differences, run_jobs
from tests.helpers.run_files import load, relative_differences

AVERAGED = [*ADASUM, *ADAM, "--adasum-sync-state", 4]
JOBS = {
    "adam_straight": Job(2, [*AVERAGED, "--max-update", 26]),
    "adam_first_part": Job(2, [*AVERAGED, "--max-update", 17]),
    "adam_second_part": Job(2, [*AVERAGED, "--max-update", 26], goes_on="adam_first_part"),
    "adam_synchronised": Job(2, [*AVERAGED, "--max-update", 8]),
    "sgd_gradient": Job(2, [*ADASUM, *SGD, "--clip-norm", 0, "--max-update", 14]),
    "sgd_delta": Job(2, [*ADASUM, *SGD, "--clip-norm", 0, "--max-update", 14, "--adasum-form", "delta"]),
    "lamb": Job(2, [*ADASUM, "--inner-optimizer", "lamb", "--max-update", 60, "--update-freq", 2, "--lr", "2e-2"]),
    "nan": Job(2, [*ADASUM, *SGD, "--bf16", "--max-update", 12], spoil="nan"),
    "nan_delta": Job(2, [*ADASUM, *ADAM, "--max-update", 6], spoil="nan"),
    "different": Job(2, [*ADASUM, *SGD, "--max-update", 4], spoil="parameters"),
    "one_node": Job(2, [*ADASUM, *SGD, "--max-update", 4, "--adasum-hierarchy", "node"]),
}


@pytest.fixture(scope="module")
def jobs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return run_jobs(JOBS, data, tmp_path_factory.mktemp("jobs"))


def test_stopping_and_going_on_in_the_delta_form_changes_no_bit(jobs: dict[str, Job]) -> None:
    """Each rank goes on with its own moments, which are averaged after the same steps; the stop falls into the middle
    of the second epoch."""
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
