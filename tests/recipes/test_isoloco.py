"""IsoLoCo against its formula in float64, by hand, in shards, and in a run of real processes."""

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import Update
from fairseq_async.method import methods
from fairseq_async.method.spec import MethodSpec, local_sgd_spec
from fairseq_async.options.config import LocalSGDOptions, ServerOptions
from fairseq_async.protocol import Layout
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.programs import local_sgd_main
from recipes.rules.isoloco import IsoLoCo
from tests.helpers.commands import HELPERS, ROOT, Processes, command
from tests.helpers.sharded import SCRIPT, Served

SHAPES = [(4, 3), (5,), (2, 6), (2, 2, 2)]


def update(delta: Tensor) -> Update:
    return Update(0, 0, 0, 1.0, delta)


def test_a_matrix_keeps_its_directions_and_has_one_singular_value() -> None:
    """diag(3, 1) becomes diag(2, 2); a vector beside it is taken as it is, and a matrix of zeros stays."""
    rule, theta = IsoLoCo(1.0, 0.0, 1, [(2, 2), (2,), (2, 2)]), torch.zeros(10)
    assert rule.apply(theta, update(torch.tensor([3.0, 0.0, 0.0, 1.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0])))
    assert theta.tolist() == pytest.approx([-2.0, 0.0, 0.0, -2.0, -3.0, -1.0, 0.0, 0.0, 0.0, 0.0])


@given(seed=st.integers(0, 2**31), workers=st.integers(1, 3))
def test_rounds_are_those_of_the_formula_in_float64(seed: int, workers: int) -> None:
    """Isotropic is the mean, and not each update; a rule that goes on from a saved state does the same."""
    sizes = [prod(shape) for shape in SHAPES]
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(sum(sizes), generator=generator)
    expected, momentum = theta.double(), torch.zeros(sum(sizes), dtype=torch.float64)
    rule = IsoLoCo(0.9, 0.8, workers, SHAPES)
    for _ in range(3):
        deltas = [torch.randn(sum(sizes), generator=generator) for _ in range(workers)]
        stepped = [rule.apply(theta, update(delta)) for delta in deltas[:-1]]
        other = IsoLoCo(0.9, 0.8, workers, SHAPES)
        other.load_state_dict(rule.state_dict())
        rule = other
        assert [*stepped, rule.apply(theta, update(deltas[-1]))] == [False] * (workers - 1) + [True]
        mean = torch.stack(deltas).double().mean(0)
        for shape, part in zip(SHAPES, mean.split(sizes), strict=True):
            if len(shape) == 2:
                matrix = part.view(shape)
                values, vectors = torch.linalg.eigh(matrix.T @ matrix)  # of V, some of 0 where the matrix is wide
                rank = min(shape)
                roots, vectors = values[-rank:].sqrt(), vectors[:, -rank:]
                part.copy_((roots.mean() * (matrix @ vectors / roots) @ vectors.T).flatten())
        momentum = 0.8 * momentum + mean
        expected = expected - 0.9 * (0.8 * momentum + mean)
        torch.testing.assert_close(theta.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("recipe_rules")
def test_matrices_are_whole_in_any_number_of_shards(tmp_path: Path) -> None:
    shapes = [(40, 30), (90, 70), (30,), (20, 20), (7, 300), (5, 5)]
    layout = Layout.of([(f"t{number}", torch.zeros(shape)) for number, shape in enumerate(shapes)])
    options = methods.parse(LocalSGDOptions, {"outer": "isoloco"}, "here")

    def spec(shards: int) -> MethodSpec:
        return local_sgd_spec(options, 2, [], ServerOptions(server_shards=str(shards)), {})

    found = []
    for shards in (1, 2, 3):
        with Served(
            local_sgd_main.build, spec(shards), tmp_path, lambda rule, own: ParameterServer(own, rule), layout=layout
        ) as made:
            before = made.parameters.clone()
            made.push(0, 6)
            found.append(made.parameters.clone())
    assert all(torch.equal(each, found[0]) for each in found) and not torch.equal(found[0], before)


@pytest.mark.usefixtures("recipe_rules")
def test_a_run_of_real_processes_is_a_flag_away(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers, which wait for each other, and a server of two shards."""
    monkeypatch.chdir(tmp_path)
    options = "local_steps=5, outer='isoloco', outer_lr=0.7, outer_momentum=0.5, server_shards=2"
    method = f"AsyncLocalSGD(model, optimizer, total_steps=300, {options})"
    script = SCRIPT.replace("HybridAsync", "AsyncLocalSGD").replace("METHOD", method)
    Path("train.py").write_text(script)
    launcher = [command("fairseq-async"), "launch", "--workers", 2, "--", "python", "train.py"]
    job = processes.start(launcher, PYTHONPATH=f"{HELPERS / 'without_fairseq'}:{ROOT}")
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    torch.testing.assert_close(torch.load("answers.pt", weights_only=True), torch.ones(8, 1), atol=0.5, rtol=0)
