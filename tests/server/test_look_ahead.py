"""Parameters ahead of the server's, for workers whose updates will be stale."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairseq_async.algorithms import HybridAccumulation, Update
from fairseq_async.server import ParameterServer
from fairseq_async.server.rounds.look_ahead import LookAhead


def test_before_anything_is_measured_a_worker_looks_ahead_by_the_running_mean_of_its_staleness() -> None:
    look_ahead = walked(*[[1.0]] * 6)
    assert look_ahead.of(0) == 0.0
    for staleness in (2, 2, 6):
        look_ahead.note(0, 0, staleness)
        look_ahead.note(1, 0, 0)
    assert look_ahead.of(0) == 3.0 and look_ahead.of(1) == 0.0
    look_ahead.note(1, 0, 1)
    assert look_ahead.of(1) == 0.0, "a quarter of a version is as good as none"
    look_ahead.note(1, 0, 1)
    assert look_ahead.of(1) == 0.0, "0.44 are, too"
    look_ahead.note(1, 0, 1)
    assert look_ahead.of(1) == 0.578125
    look_ahead.remove_worker(0)
    assert look_ahead.of(0) == 0.0


def test_a_number_is_for_all_workers_whatever_their_staleness() -> None:
    look_ahead = LookAhead(1.5)
    look_ahead.note(0, 1, 7)
    assert look_ahead.of(0) == look_ahead.of(1) == 1.5


def test_versions_of_another_part_of_the_model_are_compared_with_none() -> None:
    """A server with shards on other machines has a part of the model; the next one may have all of it."""
    part, whole = walked(*[[1.0, 2.0]] * 4), LookAhead(None)
    whole.load_state_dict(part.state_dict())
    whole.follow(4, torch.zeros(5))
    whole.follow(5, torch.ones(5))
    whole.note(0, 2, 3)
    assert whole.of(0) == 0.0
    whole.note(0, 4, 1)
    assert whole.of(0) == 1.0


def walked(*steps: list[float]) -> LookAhead:
    """The parameters have taken these steps."""
    look_ahead, place = LookAhead(None), torch.zeros(len(steps[0]))
    look_ahead.follow(0, place)
    for version, step in enumerate(steps, 1):
        place = place + torch.tensor(step)
        look_ahead.follow(version, place)
    return look_ahead


@pytest.mark.parametrize(
    ("steps", "ahead"),
    [
        ([[1.0, 2.0]] * 4, 3.0),  # straight on: as far as it is late
        ([[1.0, 0.0], [0.5, 0.0], [0.25, 0.0], [0.25, 0.0]], 1.0),  # slower and slower
        ([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 5.0]], 1.0),  # the nearest point on the line
        ([[1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]], 0.0),  # back
        ([[0.1, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], 6.0),  # no more than twice as far as it is late
    ],
)
def test_a_worker_looks_as_far_ahead_as_would_have_been_best(steps: list[list[float]], ahead: float) -> None:
    """Its update is three versions late, from version 1."""
    look_ahead = walked(*steps)
    look_ahead.note(0, 1, 3)
    assert look_ahead.of(0) == pytest.approx(ahead)
    look_ahead.note(0, 1, 3)
    assert look_ahead.of(0) == pytest.approx(ahead)


def test_of_many_parameters_a_sample_is_kept_and_of_many_versions_the_last() -> None:
    look_ahead, place = LookAhead(None), torch.zeros(100_000)
    for version in range(200):
        look_ahead.follow(version, place)
        place = place + 1.0
    look_ahead.note(0, 180, 3)
    assert look_ahead.of(0) == pytest.approx(3.0)
    assert len(look_ahead._path) == 128 and max(map(torch.numel, look_ahead._path.values())) < 1200
    given = LookAhead(2.0)
    given.follow(1, torch.zeros(3))
    assert given._path == {}, "nothing is measured where the user says how far ahead"
    look_ahead.note(1, 80, 110)
    assert look_ahead.of(1) == pytest.approx(110.0)


def test_a_worker_that_was_late_once_by_thousands_of_versions_starts_from_the_parameters_themselves() -> None:
    """Its first batch took long, as where a model is compiled; its next gradient will be hardly late."""
    look_ahead = LookAhead(None)
    for version in range(4000):
        look_ahead.follow(version, torch.full((3,), float(version)))
    look_ahead.note(0, 0, 3999)
    assert look_ahead.of(0) == 0.0
    look_ahead.note(0, 3990, 3)
    assert look_ahead.of(0) == pytest.approx(3.0)


def test_versions_that_are_taken_several_at_once_are_forgotten_too() -> None:
    look_ahead = LookAhead(None)
    for version in range(0, 1000, 5):
        look_ahead.follow(version, torch.full((3,), float(version)))
    assert sorted(look_ahead._path) == list(range(360, 1000, 5))


def test_a_state_goes_on_measuring(tmp_path: Path) -> None:
    look_ahead, again = walked(*[[1.0, 2.0]] * 4), LookAhead(None)
    look_ahead.note(0, 1, 2)
    torch.save(look_ahead.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    again.note(0, 1, 3)
    assert again.of(0) == pytest.approx(2.25)


def sgd(start: float, lr: float, keeps_last_step: bool = True) -> ParameterServer:
    parameters = torch.tensor([start])
    rule = HybridAccumulation(torch.optim.SGD([parameters], lr=lr), 1)
    return ParameterServer(parameters, rule, keeps_last_step=keeps_last_step)


def ahead(server: ParameterServer, versions: float) -> float:
    out = torch.full_like(server.parameters, torch.nan)
    server.write_ahead(out, versions)
    return out.item()


def test_it_looks_along_the_last_step_and_changes_nothing() -> None:
    server = sgd(10.0, lr=1.0)
    assert ahead(server, 2.0) == 10.0  # no step yet
    server.push(Update(0, 0, 0, 1.0, torch.tensor([4.0])))
    assert [ahead(server, versions) for versions in (0.0, 0.5, 2.0)] == [6.0, 4.0, -2.0]
    server.push(Update(0, 1, 1, 1.0, torch.tensor([-1.0])))
    assert ahead(server, 3.0) == 10.0 and server.pull(0).values.item() == 7.0


@given(st.integers(1, 4), st.floats(0.01, 0.2), st.floats(-3, 3))
def test_on_a_quadratic_with_a_constant_delay_it_is_the_closed_form(delay: int, lr: float, start: float) -> None:
    """θ²/2 has the gradient θ. With a delay of τ and a look-ahead of τ versions along the last step, plain SGD is

    θ(v+1) = θ(v) − lr · [θ(v−τ) + τ · (θ(v−τ) − θ(v−τ−1))],
    """
    server = sgd(start, lr)
    gradients = [server.parameters.item()] * delay  # of the first versions: no step has been taken
    expected = [start] * (delay + 2)  # float64; the last one is version 0
    for sequence in range(30):
        gradients.append(ahead(server, delay))
        server.push(Update(0, sequence, server.version, 1.0, torch.tensor([gradients.pop(0)])))
        stale, before = expected[-1 - delay], expected[-2 - delay]
        expected.append(expected[-1] - lr * (stale + delay * (stale - before)))
    assert server.parameters.item() == pytest.approx(expected[-1], rel=1e-4, abs=1e-5)


def test_a_server_that_comes_back_from_a_state_gives_the_same_parameters_ahead(tmp_path: Path) -> None:
    """As after a death between a step and the pull of a late worker."""
    server = sgd(10.0, lr=1.0)
    for sequence, value in enumerate((4.0, 1.0)):
        server.push(Update(0, sequence, sequence, 1.0, torch.tensor([value])))
    torch.save(server.state_dict(), tmp_path / "state.pt")
    again = sgd(0.0, lr=1.0)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert ahead(again, 2.0) == ahead(server, 2.0) == 3.0


def test_a_state_without_the_last_step_looks_nowhere() -> None:
    """As one of a run without look-ahead, with which this one goes on."""
    server = sgd(10.0, lr=1.0, keeps_last_step=False)
    server.push(Update(0, 0, 0, 1.0, torch.tensor([4.0])))
    again = sgd(0.0, lr=1.0)
    again.load_state_dict(server.state_dict())
    assert ahead(again, 2.0) == 6.0


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_error_feedback_of_whole_steps_is_look_ahead_whose_model_is_where_its_workers_start(
    delay: int, factor: float
) -> None:
    """x ← x − u − c (u − u′) with the optimizer's step u for a late gradient and the step before, u′. Without decay the
    sum telescopes to x = θ + c (θ − θ′)."""
    scale = torch.linspace(0.5, 3.0, 6, dtype=torch.float64)
    place = torch.linspace(-2.0, 3.0, 6, dtype=torch.float64)
    flat, ahead = place.clone(), place.clone()
    optimizer = torch.optim.Adam([flat], lr=0.1, betas=(0.9, 0.98))
    server = ParameterServer(flat, HybridAccumulation(optimizer, 1), keeps_last_step=True)
    starts, x = [place.clone()] * delay, place.clone()
    late, other, before = [place.clone()] * delay, torch.zeros_like(place), torch.zeros_like(place)
    reference = torch.optim.Adam([other], lr=0.1, betas=(0.9, 0.98))
    for step in range(30):
        server.write_ahead(ahead, factor)
        starts.append(ahead.clone())
        server.push(Update(0, step, max(0, step - delay), 1.0, scale * starts.pop(0)))
        late.append(x.clone())
        here, other.grad = other.clone(), scale * late.pop(0)
        reference.step()
        update = here - other
        x, before = x - update - factor * (update - before), update
        server.write_ahead(ahead, factor)
        torch.testing.assert_close(ahead, x, rtol=1e-12, atol=1e-12)
