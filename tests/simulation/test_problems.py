"""What is trained in a simulation: a function of the user's, a translation task of fairseq's."""

import json
import math
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sacrebleu import corpus_bleu
from torch import nn

from fairseq_async.errors import ConfigurationError
from fairseq_async.reporting.runs import load
from fairseq_async.simulation.problems.gaussians import Gaussians
from fairseq_async.simulation.problems.problem import _located
from fairseq_async.simulation.simulate import Simulator
from fairseq_async.simulation.workers import SharedModel
from fairseq_async.worker.shards import ShardOrder
from tests.helpers.commands import MODEL, Processes, command
from tests.helpers.simulations import METHODS, experiment


def test_a_problem_may_be_a_function_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "my_problem.py").write_text(
        "import torch\n"
        "class Line:\n"
        "    def __init__(self, seed, device, slope):\n"
        "        self.model, self.samples, self.slope = torch.nn.Linear(1, 1), 32, slope\n"
        "    def batch(self, indices): return torch.tensor([[float(i)] for i in indices]) / 32\n"
        "    def loss(self, x): return (self.model(x) - self.slope * x).square().mean(), float(len(x))\n"
        "    def evaluate(self): return float(self.loss(self.batch(range(32)))[0])\n"
    )
    given = experiment(tmp_path, problem={"type": "my_problem:Line", "slope": 3.0}, steps=400, evaluate_every=100)
    (row,) = Simulator(given, tmp_path / "out", resume=False).run()
    assert row["loss"] < 0.1


def test_a_translation_task_is_simulated_with_fairseqs_own_parts(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    arguments = MODEL[: MODEL.index("--lr")]
    problem = {"type": "fairseq_translation", "data": str(data), "flags": " ".join(arguments)}
    cluster = {"workers": 2, "seconds_per_step": [1.0, 2.0]}
    methods = {name: METHODS[name] for name in ("hybrid", "synchronous")}
    experiment(tmp_path, problem=problem, methods=methods, steps=30, batch_size=1, cluster=cluster, evaluate_every=30)
    simulate = [command("fairseq-async"), "simulate", tmp_path / "experiment.yaml", "--out", tmp_path / "out"]
    code, output = processes.run(simulate)
    assert code == 0 and "DEBUG" not in output, output  # one of fairseq's modules asks for it
    rows = json.loads((tmp_path / "out/results.json").read_text())["trials"]
    curve = load([tmp_path / "out"])[0].curve
    assert all(row["loss"] < 0.9 * (curve[0].loss or 0.0) for row in rows)
    assert rows[0]["time"] < rows[1]["time"] and rows[0]["tokens"] > 60 * 50
    assert all(row["checksum"] for row in rows)


@pytest.mark.parametrize("languages", ["", " --source-lang en --target-lang de"])
@pytest.mark.parametrize("made", [True, False])
def test_translation_data_that_is_missing_is_one_line_and_leaves_nothing(
    tmp_path: Path, languages: str, made: bool
) -> None:
    if made:
        (tmp_path / "data").mkdir()
    problem = {"type": "fairseq_translation", "data": "data", "flags": f"--arch transformer{languages}"}
    path = experiment(tmp_path, problem=problem)
    with pytest.raises(ConfigurationError, match=f'"data" {tmp_path / "data"} with these "flags"'):
        Simulator(path, tmp_path / "out", resume=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", ["--arch transfarmer", ""], ids=["unknown", "missing"])
def test_flags_that_fairseq_does_not_take_are_one_line(data: Path, tmp_path: Path, flags: str) -> None:
    problem = {"type": "fairseq_translation", "data": str(data), "flags": flags}
    with pytest.raises(ConfigurationError, match='"problem": "flags": .*--arch'):
        Simulator(experiment(tmp_path, problem=problem), tmp_path / "out", resume=False)


def test_a_validation_is_without_dropout_weighs_by_tokens_and_leaves_the_model_in_training() -> None:
    from fairseq_async.simulation.problems.translation import Translation  # which imports fairseq

    model, modes = nn.Dropout(), list[bool]()

    def criterion(model: nn.Module, sample: dict[str, float]) -> tuple[float, float, dict[str, float]]:
        modes.append(model.training)
        return 0.0, sample["tokens"], {"loss": 99.0, "nll_loss": sample["loss"]}

    held_out = [{"loss": 2.0, "tokens": 1.0}, {"loss": 4.0, "tokens": 3.0}]
    problem: Any = SimpleNamespace(model=model, criterion=criterion, held_out=held_out, _on_device=lambda each: each)
    assert Translation.evaluate(problem) == (2.0 + 4.0) / (1.0 + 3.0)
    assert modes == [False, False] and model.training


def test_the_data_of_a_problem_follow_from_the_seed() -> None:
    first, same, other = (Gaussians(seed, torch.device("cpu"), samples=64).batch(range(64))[0] for seed in (1, 1, 2))
    assert torch.equal(first, same) and not (first == other).any()


def test_batches_of_a_translation_are_not_sorted_by_length(data: Path) -> None:
    """A worker has one part of them, and fairseq shuffles them before it divides them, too."""
    from fairseq_async.simulation.problems.translation import Translation  # which imports fairseq

    flags = " ".join([*MODEL[: MODEL.index("--lr")], "--max-tokens", "60"])
    first, same, other = (Translation(seed, torch.device("cpu"), data, flags).train for seed in (1, 1, 2))
    orders = [[sample["id"].tolist() for sample in train] for train in (first, same, other)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(n for ids in orders[0] for n in ids) == list(range(600))
    lengths = [float(sample["net_input"]["src_lengths"].float().mean()) for sample in first]
    half = len(lengths) // 2
    assert fmean(lengths[:half]) == pytest.approx(fmean(lengths[half:]), rel=0.1)


def test_the_bleu_of_a_translation_is_sacrebleus_of_the_plain_sentences(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fairseq_async.simulation.problems.translation import Translation  # which imports fairseq

    flags = [*MODEL[: MODEL.index("--lr")], "--max-target-positions", "16"]
    problem = Translation(1, torch.device("cpu"), data, " ".join(flags))
    assert problem.bleu(beam=1, pieces=None) < 5.0 and problem.model.training  # it has not learned anything yet

    def translate(generator: object, models: list[nn.Module], sample: dict[str, Any]) -> list[Any]:
        """Leaves the first word out of every third sentence."""
        assert not models[0].training
        pads = problem.task.target_dictionary.pad()
        targets = [target[target != pads] for target in sample["target"]]
        return [[{"tokens": t[int(n % 3 == 0) :]}] for n, t in zip(sample["id"].tolist(), targets, strict=True)]

    monkeypatch.setattr(problem.task, "inference_step", translate)
    references = (data.parent / "valid.b").read_text().splitlines()  # the test set is the same
    translations = [text.partition(" ")[2] if n % 3 == 0 else text for n, text in enumerate(references)]
    score = corpus_bleu(translations, [references]).score
    assert problem.bleu(pieces=None) == pytest.approx(score) and 50 < score < 99


def test_paths_of_a_problem_are_relative_to_the_experiment_file() -> None:
    given = {"data": "text", "init": "/models/first.pt", "flags": "--arch tiny"}
    here = Path("/experiments")
    assert _located(given, here) == given | {"data": here / "text", "init": Path("/models/first.pt")}


def test_an_evaluation_may_be_of_the_first_batches_of_the_validation(data: Path) -> None:
    from fairseq_async.simulation.problems.translation import Translation  # which imports fairseq

    flags = " ".join([*MODEL[: MODEL.index("--lr")], "--max-tokens", "60"])
    whole, first = (Translation(1, torch.device("cpu"), data, flags, count).held_out for count in (0, 2))
    assert len(whole) > len(first) == 2


def test_an_evaluation_in_bf16_is_of_the_parameters_of_now_and_a_fifth_of_the_points() -> None:
    """Of eight classes, where the model knows nothing. The training points are others."""
    problem = Gaussians(1, torch.device("cpu"), samples=64, hidden=2)
    assert len(problem.points) == 64 + 16
    model = SharedModel(problem, 2, ShardOrder([64], 1), 1, bf16=True)
    model.evaluate()
    model.flat.zero_()
    assert model.evaluate() == pytest.approx(math.log(8))
