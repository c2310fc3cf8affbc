"""A whole experiment: every method on every cluster, broken off and resumed, and the report about it."""

import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fairseq_async.errors import ConfigurationError
from fairseq_async.reporting import page
from fairseq_async.reporting.audit import audit
from fairseq_async.reporting.runs import COMPUTING, WAITING, load
from fairseq_async.simulation.experiment import Experiment, Target, read
from fairseq_async.simulation.records import Records, _remark
from fairseq_async.simulation.simulate import Interrupted, Simulator, _loss
from fairseq_async.simulation.trial import Trial
from tests.helpers.simulations import BASE, METHODS, experiment
from tests.helpers.stand_ins import Time


@pytest.fixture
def both(tmp_path: Path) -> Experiment:
    clusters = {name: {"workers": 2, "seconds_per_step": [1.0, slow]} for name, slow in (("equal", 1.0), ("slow", 2.0))}
    path = tmp_path / "both.yaml"
    methods = {name: METHODS[name] for name in ("synchronous", "hybrid", "DiLoCo")}
    content = BASE | {"methods": methods, "clusters": clusters, "target": {"of": "synchronous", "within": 0.5}}
    content.pop("cluster")
    path.write_text(yaml.safe_dump(content | {"pretraining": {"steps": 3}}, sort_keys=False))
    return read(path)


def test_every_method_meets_every_cluster_from_one_state(both: Experiment, tmp_path: Path) -> None:
    rows = Simulator(both, tmp_path / "out", resume=False).run()
    assert [(row["cluster"], row["method"]) for row in rows] == [
        (cluster, method) for cluster in ("equal", "slow") for method in ("synchronous", "hybrid", "DiLoCo")
    ]
    assert len({run.curve[0].loss for run in load([tmp_path / "out"])}) == 1
    by = {(row["cluster"], row["method"]): row for row in rows}
    assert by["slow", "synchronous"]["time"] == 24.0 and by["slow", "hybrid"]["time"] == pytest.approx(16.0, abs=1)
    assert by["slow", "hybrid"]["time_to_target"] <= by["slow", "synchronous"]["time_to_target"]
    assert by["equal", "synchronous"]["checksum"] == by["slow", "synchronous"]["checksum"]
    assert not list((tmp_path / "out").glob("**/state.pt"))


def test_ctrl_c_saves_and_resume_ends_with_the_same_bits(
    both: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Simulator(both, tmp_path / "whole", resume=False).run()
    broken, advance = Simulator(both, tmp_path / "broken", resume=False), Trial.advance
    left = iter(range(40))

    def stopping(self: Trial) -> bool:
        if next(left, None) is None:
            broken._interrupt(2, None)
        return advance(self)

    monkeypatch.setattr(Trial, "advance", stopping)
    with pytest.raises(Interrupted):
        broken.run()
    monkeypatch.setattr(Trial, "advance", advance)
    assert list((tmp_path / "broken").glob("**/state.pt"))
    with pytest.raises(ConfigurationError, match="holds a simulation: go on with it by --resume"):
        Simulator(both, tmp_path / "broken", resume=False)
    rest = Simulator(both, tmp_path / "broken", resume=True).run()
    for a, b in zip(whole, rest, strict=True):
        assert {**a, "real_seconds": 0} == {**b, "real_seconds": 0}
    for path in (tmp_path / "whole").glob("**/*.jsonl"):
        assert path.read_text() == (tmp_path / "broken" / path.relative_to(tmp_path / "whole")).read_text()


def test_a_state_is_saved_every_two_minutes_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A happening takes 25 seconds here."""
    time, saved, advance = Time(), list[float](), Trial.advance

    def advance_slowly(trial: Trial) -> bool:
        time.now += 25.0
        return advance(trial)

    monkeypatch.setattr("fairseq_async.simulation.simulate.time", time)
    monkeypatch.setattr(Trial, "advance", advance_slowly)
    monkeypatch.setattr(Records, "save", lambda records, trial: saved.append(time.now))
    given = experiment(tmp_path, methods={"it": METHODS["synchronous"]})
    (row,) = Simulator(given, tmp_path / "out", resume=False).run()
    assert saved[:3] == [1125.0, 1250.0, 1375.0]
    assert row["real_seconds"] % 25.0 == 0 and row["real_seconds"] > 300.0


def test_a_loss_that_is_not_finite_is_null_in_all_files_also_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has no infinity."""
    given = experiment(
        tmp_path,
        methods={"it": METHODS["synchronous"]},
        optimizer={"type": "sgd", "lr": 1e38},
        schedule={},
        evaluate_every=1,
        target={"of": "it"},
    )
    broken, advance = Simulator(given, tmp_path / "out", resume=False), Trial.advance

    def advance_and_stop(trial: Trial) -> bool:
        broken._stop = trial.version == 6
        return advance(trial)

    monkeypatch.setattr(Trial, "advance", advance_and_stop)
    with pytest.raises(Interrupted):
        broken.run()
    monkeypatch.undo()
    (row,) = Simulator(given, tmp_path / "out", resume=True).run()
    assert row["loss"] is None and row["target"] is None and row["time_to_target"] is None
    for name in ("results.json", "it/summary.json", "it/curve.jsonl"):
        text = (tmp_path / "out" / name).read_text()
        assert '"loss": null' in text and "Infinity" not in text and "NaN" not in text


def test_a_perplexity_is_a_dash_where_no_cell_has_room_for_it() -> None:
    cells = {None: ["-", "-"], math.inf: ["-", "-"], 2.0: ["2.0000", "7.39"], 1e3: ["1000.0000", "-"]}
    assert {loss: _loss(loss) for loss in cells} == cells


def test_a_report_is_one_page_that_needs_no_network(both: Experiment, tmp_path: Path) -> None:
    Simulator(both, tmp_path / "out", resume=False).run()
    runs = load([tmp_path / "out"])
    written = page.write(runs, "both & more", tmp_path / "report").read_text()
    assert "both &amp; more" in written and "DiLoCo" in written
    assert "http" not in written.replace("data:image", "") and "<script" not in written
    pictures = list((tmp_path / "report").glob("*.png"))
    assert {"slow-loss.png", "equal-timelines.png", "slow-staleness.png"} <= {path.name for path in pictures}
    assert written.count("<img") == len(pictures)
    slow = next(run for run in runs if run.group == "slow" and run.name == "synchronous")
    assert slow.shares(0)[COMPUTING] == pytest.approx(0.5) and slow.shares(0)[WAITING] == pytest.approx(0.5)
    assert slow.shares(1)[COMPUTING] == pytest.approx(1.0)


def test_a_worker_that_never_came_has_an_empty_row(tmp_path: Path) -> None:
    cluster = {"workers": 2, "absences": [{"worker": 0, "from": 0}]}
    given = experiment(tmp_path, methods={"hybrid": METHODS["hybrid"] | {"updates_per_step": 1}}, cluster=cluster)
    Simulator(given, tmp_path / "out", resume=False).run()
    runs = load([tmp_path / "out"])
    assert runs[0].shares(0)[COMPUTING] == 0.0 and runs[0].shares(1)[COMPUTING] == 1.0
    assert (tmp_path / "report" / "report.html") == page.write(runs, "late", tmp_path / "report")


def test_a_report_shows_what_closed_steps_and_look_ahead_do(tmp_path: Path) -> None:
    """Workers of 1 and 1.2 s step together, and the first waits; one of 4 s looks ahead, and nobody waits for it."""
    workers = {"near": [1.0, 1.2], "far": [1.0, 4.0]}
    runs = {}
    for name, seconds in workers.items():
        cluster = {"workers": 2, "seconds_per_step": seconds}
        given = experiment(tmp_path, methods={"hybrid": {"method": "hybrid_async"}}, cluster=cluster)
        Simulator(given, tmp_path / name, resume=False).run()
        (runs[name],) = load([tmp_path / name])
    near, far = (page.worker_row(runs[name], worker) for name, worker in (("near", 0), ("far", 1)))
    held, ahead = "held for others, mean (s)", "ahead at its start (versions)"
    assert (near[held], near["longest (s)"], near[ahead]) == ("0.20", "0.20", "0.00")
    assert set(runs["near"].step_sizes) == {2} and set(runs["far"].step_sizes) == {1, 2}
    assert far["staleness (versions)"] >= "2.00" and far[ahead] >= "1.00"
    written = page.write([runs["far"]], "far", tmp_path / "report").read_text()
    assert "Updates in a step" in written and f"<td>{far['staleness (versions)']}</td>" in written


def test_a_directory_without_a_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no run and no simulation there"):
        load([tmp_path])


@pytest.mark.parametrize("name", ["experiment.json", "start.pt"])
def test_a_file_of_a_simulation_before_that_cannot_be_read_is_one_line(
    both: Experiment, tmp_path: Path, name: str
) -> None:
    Simulator(both, tmp_path / "out", resume=False).run()
    (tmp_path / "out" / name).write_bytes(b"{")
    with pytest.raises(
        ConfigurationError, match=f"{name} cannot be read: .*; remove it, or give another --out"
    ) as error:
        Simulator(both, tmp_path / "out", resume=True).run()
    assert "\n" not in str(error.value)


def test_the_files_of_a_trial_stay_in_the_directory_of_the_simulation(tmp_path: Path) -> None:
    given = experiment(tmp_path, methods={"..": METHODS["synchronous"]})
    Simulator(given, tmp_path / "out", resume=False).run()
    assert (tmp_path / "out" / "_.." / "run.json").exists() and not (tmp_path / "run.json").exists()


def test_a_date_may_be_a_seed_and_a_cluster_may_have_any_name(tmp_path: Path) -> None:
    given = experiment(
        tmp_path, seed=20240101, cluster=None, clusters={name: {"workers": 2} for name in ("2/4", "slow")}
    )
    assert len(Simulator(given, tmp_path / "out", resume=False).run()) == 2
    page.write(load([tmp_path / "out"]), "both", tmp_path / "report")
    names = sorted(path.name for path in (tmp_path / "report").glob("*-loss*"))
    assert len(names) >= 2 and {name.rsplit("-loss", 1)[0] for name in names} == {"2_4", "slow"}


def test_a_simulation_of_regions_has_the_steps_of_the_global_server(tmp_path: Path) -> None:
    """Each region counts its own versions: their lines together say nothing of steps, and cannot be audited."""
    regions = {"workers": 4, "regions": 2, "between_regions": {"seconds": 1.0}}
    halos = {"method": "local_sgd", "outer": "delayed_nesterov", "local_steps": 2, "delay": 2}
    halos |= {"global": {"updates": 8, "delay": 2}}
    given = experiment(tmp_path, steps=64, cluster=regions, methods={"HALoS": halos})
    (summary,) = Simulator(given, tmp_path / "out", resume=False).run()
    (run,) = load([tmp_path / "out"])
    row = page.row(run)
    assert row["updates in a step"] == "-" and row["steps of the server"] == f"{run.curve[-1].updates:,}"
    assert run.curve[-1].updates < max(event.version_after for event in run.events), summary
    assert run.curve[-1].time > max(event.time for event in run.events), "the last drift arrives after the last step"
    (events,) = (tmp_path / "out").rglob("events.jsonl")
    with pytest.raises(ConfigurationError, match="a simulation of several regions, each of which counts its own"):
        audit(events.parent)


def test_a_run_is_evaluated_at_its_beginning_after_so_many_mean_steps_and_once_at_its_end(tmp_path: Path) -> None:
    """Of three workers, which step together every four seconds."""
    given = experiment(tmp_path, methods={"it": METHODS["synchronous"]}, evaluate_every=4)
    Simulator(given, tmp_path / "out", resume=False).run()
    (run,) = load([tmp_path / "out"])
    assert [point.time for point in run.curve] == [0.0, 16.0, 32.0, 48.0]


def test_a_target_is_the_loss_of_the_other_method_on_the_same_cluster(tmp_path: Path) -> None:
    trials = zip(product("ab", "xy"), (1.0, 2.0, 3.0, 4.0), strict=True)
    rows: list[dict[str, Any]] = [{"cluster": c, "method": m, "loss": loss} for (c, m), loss in trials]
    simulator: Any = SimpleNamespace(pairs=[SimpleNamespace(directory=lambda out: out)] * 4, out=tmp_path)
    simulator.experiment = SimpleNamespace(target=Target(of="x", within=0.5))
    Simulator._add_targets(simulator, rows)
    assert [row["target"] for row in rows] == [1.5, 1.5, 4.5, 4.5]


def test_the_staleness_of_a_run_is_that_of_the_updates_that_were_applied(tmp_path: Path) -> None:
    method = {"method": "local_sgd", "outer": "sgd", "local_steps": 1, "staleness_limit": 0}
    (row,) = Simulator(experiment(tmp_path, methods={"it": method}), tmp_path / "out", resume=False).run()
    (run,) = load([tmp_path / "out"])
    assert max(event.staleness for event in run.events) > 0 == row["staleness"] == row["largest_staleness"]


@pytest.mark.parametrize(
    ("diverged", "finished", "remark"), [(True, True, "diverged"), (False, True, ""), (False, False, "stopped: all")]
)
def test_a_run_that_did_not_come_to_its_end_has_a_remark(diverged: bool, finished: bool, remark: str) -> None:
    run: Any = SimpleNamespace(diverged=diverged, finished=finished)
    assert _remark(run).partition(" wait")[0] == remark
