"""The program that says what codecs do to the loss."""

import math
from pathlib import Path

import pytest
import yaml

from fairseq_async.simulation.experiment import Experiment, read
from scripts.bench.compression_learning import GRADIENTS, LOCAL_SGD, Bench, Outcome, check, row
from scripts.bench.report import Report


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    given = {
        "problem": {"type": "gaussians", "samples": 64, "hidden": 2},
        "steps": 8,
        "batch_size": 2,
        "pretraining": {"steps": 2},
        "cluster": {"workers": 2},
        "methods": {
            "fp32": {"method": "local_sgd", "local_steps": 2},
            "dqsgd": {"method": "local_sgd", "local_steps": 2, "compress": "dqsgd:bits=5"},
        },
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(given, sort_keys=False))
    return read(tmp_path / "experiment.yaml")


def test_what_was_run_is_kept_with_the_bytes_of_each_update(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, small = (Bench(tmp_path / "out").outcome(experiment, number, seed=1) for number in (0, 1))
    assert plain.share == 1.0 and len(plain.sent) == len(small.sent) == 8
    assert small.share < 0.8 and set(plain.bits) == {32}
    monkeypatch.setattr(Bench, "_run", None)
    assert Bench(tmp_path / "out").outcome(experiment, 1, seed=1) == small


def test_a_method_is_compared_seed_by_seed_and_a_broken_bound_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    reference = [Outcome(loss, 1.0, 100, [400] * 20) for loss in (1.0, 2.0)]
    found = [Outcome(loss + math.log(1.25), 1.0, 100, [40] * 2 + [10] * 18) for loss in (1.0, 2.0)]
    own = row("topk", found, reference)
    assert (own["over fp32"], own["standard error"]) == pytest.approx((1.25, 0.0))
    assert (own["in the first tenth"], own["in the last tenth"]) == pytest.approx((10.0, 40.0))
    report = Report("a test")
    check(report, LOCAL_SGD, [own])
    check(report, GRADIENTS, [own | {"method": "adacomp"}])
    assert [bound.holds for bound in report.bounds] == [False, True]
    assert "topk: perplexity over fp32: 1.25 (at most 1.03: BROKEN)" in capsys.readouterr().out
