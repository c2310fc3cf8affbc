"""The experiment file: its mistakes are one line each."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairseq_async.errors import ConfigurationError
from fairseq_async.simulation.cluster import Speed
from fairseq_async.simulation.experiment import read
from fairseq_async.simulation.simulate import Simulator
from tests.helpers.simulations import BASE, DN, experiment

TWO_SAMPLES = {"type": "gaussians", "samples": 2}


def _speed(seconds: Any) -> dict[str, Any]:
    return {"cluster": {"workers": 2, "seconds_per_step": [1.0, seconds]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepps": 3}, 'unknown key "stepps"; known are'),
        ({"methods": None}, '"methods": Input should be a valid dictionary'),
        ({"steps": 0}, '"steps": Input should be greater than or equal to 1 (it is 0)'),
        ({"methods": {"DN": DN | {"outter": "sgd"}}}, 'method DN: unknown key "outter"; known are'),
        ({"methods": {"DN": {"method": "sgdd"}}}, 'method DN: "method": sgdd: there is no such method; there are'),
        ({"methods": {"DN": {}}}, 'method DN: "method" is missing; there are'),
        ({"methods": {"DN": DN | {"outer": "sgdd"}}}, 'method DN: "outer"'),
        ({"methods": {"DN": DN | {"overlap": True}}}, 'method DN: "overlap" cannot be set for one method'),
        ({"methods": {"DN": DN | {"c": 0.1, "outer": "sgd"}}}, '"c" is of no use with "outer" sgd'),
        ({"methods": {"A": {"method": "adascale"}}}, 'adascale is simulated with "optimizer": "type": sgd, not adamw'),
        ({"methods": {"DN": DN | {"optimizer": {"lrr": 1}}}}, 'method DN, optimizer: unknown key "lrr"'),
        ({"cluster": {"workers": 2, "seconds_per_step": [1, 2, 3]}}, "seconds_per_step has 3 entries for 2 workers"),
        ({"cluster": {"workers": 2, "seconds_per_step": -1}}, '"seconds_per_step'),
        ({"cluster": {"workers": 2, "exchange": {"sec": 1}}}, 'unknown key "exchange.sec"'),
        ({"cluster": {"workers": 1, "absences": [{"worker": 1, "from": 2}]}}, "absences name worker 1; there are 1"),
        ({"cluster": {"workers": 1, "absences": [{"worker": 0, "from": 2, "to": 1}]}}, "it must be after from"),
        ({"cluster": {"workers": 1, "seconds_per_step": {"trace": "nowhere"}}}, "nowhere cannot be read"),
        ({"cluster": {"workers": 1, "absences": [{"worker": 0, "from": 2, "to": math.nan}]}}, '"absences.0.to": Input'),
        (
            {"cluster": {"workers": 1, "exchange": {"seconds": math.inf}}},
            '"exchange.seconds": Input should be a finite',
        ),
        (_speed({"distribution": "normal", "mean": 1}), '"seconds_per_step": distribution: Input should be'),
        (_speed({"distribution": "uniform", "mean": 1, "spread": 0.9}), "of a uniform distribution is at most 0.57"),
        (_speed({"distribution": "lognormal", "mean": math.inf}), '"seconds_per_step": mean: Input should be a finite'),
        (_speed({"mean": 1}), "give a number, or a mapping with either distribution or trace"),
        ({"cluster": None}, 'give "cluster", or several with names as "clusters"'),
        ({"schedule": {"type": "cosinus"}}, 'schedule: "type"'),
        ({"optimizer": {"lr": 0}}, 'optimizer: "lr"'),
        ({"problem": {"type": "gaussian"}}, '"problem": "type": gaussian; there are gaussians, c4_lm'),
        ({"problem": {"type": "nowhere:f"}}, '"problem": "type": nowhere:f cannot be imported'),
        ({"problem": {"type": "gaussians", "wigth": 3}}, '"problem" (gaussians)'),
        ({"target": {"of": "X"}}, '"of": X: there is no such method; there are DN'),
        ({"optimizer": {"type": "adam", "momentum": 0.9}}, "momentum is of no use with adam: leave it out"),
        ({"schedule": {"minimum": 0.1}}, "minimum is of no use with constant: leave it out"),
        (
            {"cluster": {"workers": 1, "absences": [{"worker": 0, "from": 2}, {"worker": 0, "from": 3, "to": 4}]}},
            "absences of worker 0 overlap at 3",
        ),
        (
            {"cluster": {"workers": 2, "regions": 2, "between_regions": {"server_seconds": 1}}},
            "between_regions is the time of a transfer: give server_seconds in exchange",
        ),
        (_speed({"trace": "seconds.txt", "worker": 1}), "a file of numbers is of one worker: leave worker out"),
        ({"target": {}}, 'target: give "loss", or "of"'),
        ({"optimizer": {"betas": [0.9, 1.5]}}, 'optimizer: "betas.1": Input should be less than 1 (it is 1.5)'),
        ({"seed": 1 << 70}, '"seed": Input should be less than'),
        ({"batch_size": 257}, '"batch_size" is 257: the problem has 256 samples'),
        ({"device": "gpu3"}, '"device": gpu3 cannot be used'),
        ({"problem": {"type": "gaussians", "classes": 0}}, '"classes" must be a whole number of at least 1 (it is 0)'),
        ({"problem": {"type": ":f"}}, '"problem": "type": :f cannot be imported'),
        ({"bf16": True}, 'method DN: "bf16" is simulated with hybrid_async: leave one of them out'),
        (
            {"bf16": True, "pretraining": {"steps": 1}, "methods": {"A": {"method": "hybrid_async"}}},
            '"pretraining" is in fp32: leave it out, or "bf16"',
        ),
        ({"methods": {"a/b": DN, "a b": DN}}, "the files of a/b and of a b would both be in"),
        (
            {"cluster": None, "clusters": {"a": {"workers": 1}, "b": {"workers": 3}}, "problem": TWO_SAMPLES},
            "the problem has 2 samples for 3 workers",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Simulator(experiment(tmp_path, **change), tmp_path / "out", resume=False).run()
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (DN | {"delay": 4, "c": 0.3}, "--c is 0.3: with --delay 4 it must be in [0, 1/4]"),
        (DN | {"local_steps": 8, "fragments": 8}, "--fragments is 8: the model has 4 tensors"),
        ({"method": "hybrid_async", "barrier": True, "updates_per_step": 4}, "--updates-per-step is 4"),
    ],
)
def test_a_method_that_does_not_fit_its_cluster_is_said_before_others_have_run(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    given = experiment(tmp_path, methods={"right": DN | {"delay": 4, "c": 0.25}, "wrong": wrong})
    with pytest.raises(ConfigurationError) as caught:
        Simulator(given, tmp_path / "out", resume=False)
    assert f"{given.path}, method wrong: {message}" in str(caught.value) and not (tmp_path / "out").exists()


def test_a_key_that_is_given_twice_is_refused_and_one_in_place_of_a_merged_one_is_not(tmp_path: Path) -> None:
    """YAML would keep the last of two methods of one name."""
    path = experiment(tmp_path).path
    once = yaml.safe_dump({key: value for key, value in BASE.items() if key != "cluster"})
    once += "clusters: {a: &a {workers: 2}, b: {<<: *a, workers: 3}}\n"
    path.write_text(once + "methods: {DN: {method: local_sgd}}\n")
    assert read(path).clusters["b"].workers == 3
    path.write_text(once + "methods: {DN: {method: local_sgd}, DN: {method: hybrid_async}}\n")
    with pytest.raises(ConfigurationError, match='cannot be read: "DN" is given twice in .*, line') as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_a_trace_is_relative_to_the_experiment_file(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("2.5\n")
    for given in ({"trace": "trace.txt"}, [{"trace": "trace.txt"}]):
        (cluster,) = experiment(tmp_path, cluster={"workers": 1, "seconds_per_step": given}).clusters.values()
        assert Speed(cluster.seconds_of(0), 0, seed=1).mean == 2.5


@pytest.mark.parametrize("seconds", ["0", "nan", "inf"])
def test_a_trace_has_times_above_0(tmp_path: Path, seconds: str) -> None:
    (tmp_path / "trace.txt").write_text(f"1.0\n{seconds}\n")
    given = experiment(tmp_path, **_speed({"trace": str(tmp_path / "trace.txt")}))
    with pytest.raises(ConfigurationError, match="no seconds above 0 of worker 0 in it"):
        Simulator(given, tmp_path / "out", resume=False)


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "1: 2\n", ""])
def test_a_file_that_is_no_experiment_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path / "x.yaml")
    assert "x.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("steps", "given", "every"), [(100, None, 5.0), (12, None, 1.0), (100, 2.5, 2.5)])
def test_a_run_is_evaluated_twenty_times_unless_the_file_says_how_often(
    tmp_path: Path, steps: int, given: float | None, every: float
) -> None:
    assert experiment(tmp_path, steps=steps, evaluate_every=given).evaluate_every == every


def test_an_optimizer_of_another_kind_has_the_common_options_that_it_knows(tmp_path: Path) -> None:
    common = {"type": "sgd", "lr": 0.2, "momentum": 0.9, "weight_decay": 0.1}
    given = experiment(tmp_path, optimizer=common, methods={"it": DN | {"optimizer": {"type": "adam"}}})
    own = given.methods[0].optimizer
    assert (own.type, own.lr, own.momentum, own.weight_decay) == ("adam", 0.2, 0.0, 0.1)
