"""The page of runs: what worker 0's validations say, numbers with units, runs side by side."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from matplotlib import pyplot

from fairseq_async import cli
from fairseq_async.records.event_log import ROLLBACKS
from fairseq_async.records.validations import VALIDATIONS, Validation, not_taken_back
from fairseq_async.reporting import page, plots
from fairseq_async.reporting.plots import figures
from fairseq_async.reporting.runs import load
from scripts.faults.sgd_server import sgd_spec

FAIRSEQ = {"inner_optimizer": {"_name": "sgd"}}


@pytest.fixture(autouse=True)
def drawn() -> Iterator[None]:
    """What a test draws without a page stays open."""
    yield
    pyplot.close("all")


def write_run(
    run_dir: Path, updates: int, tokens: float, framework: Mapping[str, object] = FAIRSEQ, **more: object
) -> Path:
    """A run of one worker and three parameters, with an update a second."""
    run_dir.mkdir()
    method = sgd_spec(workers=1).to_json() | {"framework": framework}
    description = {"workers": 1, "method": method, "layout": [["weight", [3], "float32"]]}
    (run_dir / "run.json").write_text(json.dumps(description))
    fields = {
        "worker": 0,
        "staleness": 0,
        "weight": tokens,
        "status": "applied",
        "loss": 2.0,
        "bytes_sent": 12_000,
    } | more
    lines = [
        fields | {"time": 100.0 + n, "sequence": n, "base_version": n, "version_after": n + 1} for n in range(updates)
    ]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_validations_that_a_restart_has_taken_back_do_not_count(tmp_path: Path) -> None:
    written = [Validation(1.0, at, 1, loss) for at, loss in ((10, 4.0), (20, 3.0), (30, 2.0), (20, 2.5), (40, 1.0))]
    assert [(each.updates, each.loss) for each in not_taken_back(written)] == [(10, 4.0), (20, 2.5), (40, 1.0)]


def test_a_loss_that_is_not_finite_is_written_as_none_is(tmp_path: Path) -> None:
    Validation(1.0, 10, 1, float("nan"), "bleu", 3.5).append(tmp_path)
    assert json.loads((tmp_path / VALIDATIONS).read_text()) == {
        "time": 1.0,
        "updates": 10,
        "epoch": 1,
        "loss": None,
        "metric": "bleu",
        "score": 3.5,
    }


def test_the_page_has_validation_loss_score_and_bytes_of_runs_side_by_side(tmp_path: Path) -> None:
    """One run has no validation, and one that is 4 times longer has tokens that need a short number."""
    first, second = write_run(tmp_path / "one", 5, 100.0), write_run(tmp_path / "two", 20, 250_000.0)
    for at, loss, score in ((2, 5.0, 1.0), (5, 4.25, 12.5)):
        Validation(100.0 + at, at, 1, loss, "bleu", score).append(first)
    with (first / "events.jsonl").open("a") as file:
        refused = {"worker": 0, "staleness": 0, "weight": 100.0, "status": "refused", "bytes_sent": 0, "time": 104.0}
        file.write(json.dumps(refused | {"sequence": 5, "base_version": 5, "version_after": 5}) + "\n")
    runs = load([first, second])
    written = page.write(runs, "both", tmp_path / "report").read_text()
    rows = dict(re.findall(r"<tr><td>([^<]*)</td>(.*?)</tr>", written))
    cells = {name: re.findall(r"<td>([^<]*)</td>", row) for name, row in rows.items()}
    assert cells["last validation loss"] == ["4.2500", "-"] and cells["last bleu"] == ["12.50", "-"]
    assert cells["refused updates"] == ["1", "0"]
    assert cells["target tokens"] == ["500", "5,000,000"] and cells["time (s)"] == ["4.0", "19.0"]
    assert cells["sent by workers (MB)"] == ["0.06", "0.24"]
    assert cells["one"][:2] == ["0", "5"] and cells["two"][:2] == ["0", "20"]  # the workers' table
    assert {"validation_loss.png", "bleu.png"} <= {path.name for path in (tmp_path / "report").glob("*.png")}


def test_runs_are_rows_where_columns_have_no_room_or_no_names_of_their_own(tmp_path: Path) -> None:
    for name in range(7):
        write_run(tmp_path / f"run {name}", 2, 1.0, **{"bytes_sent": None})
    runs = load([tmp_path])
    for each in (runs, [runs[0], runs[0]]):
        assert [row["run"] for row in page._overview(each)] == [run.name for run in each]
    assert [row[""] for row in page._overview(runs[:6])] == [name for name in page.row(runs[0]) if name != "run"]
    assert page.row(runs[0])["sent by workers (MB)"] == "-"
    assert {"updates": 0, "staleness (versions)": "-"}.items() <= page.worker_row(runs[0], 3).items()


def test_several_runs_in_one_directory_have_their_own_names(tmp_path: Path) -> None:
    for name in ("with", "without"):
        write_run(tmp_path / name, updates=2, tokens=3.0)
    assert [run.name for run in load([tmp_path])] == ["with", "without"]


def test_the_time_for_which_an_interrupted_run_stood_still_is_no_time_of_the_run(tmp_path: Path) -> None:
    """Four updates a second apart; the third is the first after an hour, for which nothing ran."""
    run = write_run(tmp_path / "run", updates=4, tokens=10.0)
    events = [json.loads(line) for line in (run / "events.jsonl").open()]
    late = [event | {"time": event["time"] + 3600 * (event["sequence"] > 1)} for event in events]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in late))
    start = {"time": 3701.0, "source": "snapshot version-2.pt", "sequences": {0: 1}, "events": 0}
    (run / ROLLBACKS).write_text(json.dumps(start) + "\n")
    (found,) = load([run])
    assert [event.time for event in found.events] == [0.0, 1.0, 2.0, 3.0]
    assert page.row(found)["target tokens/s"] == "13"


def test_a_merge_with_the_global_parameters_is_no_step_of_the_server(tmp_path: Path) -> None:
    """Two updates a step, from version 5 on: after the first the region merges, which makes version 7."""
    run = write_run(tmp_path / "run", updates=4, tokens=10.0)
    events = [json.loads(line) for line in (run / "events.jsonl").open()]
    made = [{"version_after": 5}, {"version_after": 6}, {"version_after": 7, "merged": [7]}, {"version_after": 8}]
    lines = (json.dumps(event | {"base_version": 5} | own) + "\n" for event, own in zip(events, made, strict=True))
    (run / "events.jsonl").write_text("".join(lines))
    (found,) = load([run])
    assert found.step_sizes == [2, 2] and found.steps == 7


def test_weights_are_called_tokens_where_they_count_tokens_alone(tmp_path: Path) -> None:
    """Gradients of DeepSpeed are weighted by samples, those of plain PyTorch equally."""
    runs = load([write_run(tmp_path / "fairseq", 5, 100.0), write_run(tmp_path / "torch", 5, 1.0, {})])
    counted = [{name for name in page.row(run) if "tokens" in name} for run in runs]
    assert counted == [{"target tokens", "target tokens/s"}, set()]
    _, figure = figures(runs)["loss"]
    assert figure.axes[1].get_xlabel() == "target tokens / weight of the updates"


def test_a_directory_whose_name_is_no_text_is_drawn_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one from a system whose names were Latin-1."""
    run = write_run(Path(os.fsdecode(bytes(tmp_path) + b"/r\xfcn")), 5, 100.0)
    monkeypatch.setattr("sys.argv", ["fairseq-async", "report", str(run), "--out", str(tmp_path / "report")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code and "r?n" in (tmp_path / "report" / "report.html").read_text()


def test_a_compressed_run_has_bytes_per_second_ratio_and_residual_of_each_worker(tmp_path: Path) -> None:
    """Three parameters, 12 bytes in fp32: 6 of them in each of five updates, in four seconds."""
    own = {"payload": "00c0ffee", "residual_norm": 0.125, "bytes_sent": 6}
    small, plain = load([write_run(tmp_path / "small", 5, 100.0, **own)]), load([write_run(tmp_path / "plain", 5, 1.0)])
    names = ["sent (kB/s)", "times fewer bytes than fp32", "residual (L2 norm)"]
    row, worker = page.row(small[0]), page.worker_row(small[0], 0)
    assert [row[name] for name in names] == [worker[name] for name in names] == ["0.0075", "2.0", "0.125"]
    assert not set(names) & {*page.row(plain[0]), *page.worker_row(plain[0], 0)}


def test_a_run_with_shares_shows_them_along_it(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", 4, 100.0)
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").open()]
    written = [json.dumps(line | {"micro_batches": number}) for line, number in zip(lines, (4, 4, 6, 6), strict=True)]
    (run_dir / "events.jsonl").write_text("\n".join(written) + "\n")
    (run,) = load([run_dir])
    assert page.worker_row(run, 0)["micro-batches, last"] == 6
    caption, figure = figures([run])["micro_batches"]
    assert caption == "Micro-batches of each gradient, by worker"
    assert list(figure.axes[0].lines[0].get_ydata()) == [4, 4, 6, 6]
    assert "micro_batches" not in figures(load([write_run(tmp_path / "equal", 4, 100.0)]))


def test_the_axis_of_tokens_has_a_few_short_numbers(tmp_path: Path) -> None:
    (run,) = load([write_run(tmp_path / "run", 20, 250_000.0)])
    _, figure = figures([run])["loss"]
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert "3M" in labels and len(labels) <= 8


def test_the_bars_of_each_run_are_its_shares(tmp_path: Path) -> None:
    """Of updates in the one histogram, and of steps in the other: they add up to 1."""
    runs = load([write_run(tmp_path / "fresh", 4, 1.0), write_run(tmp_path / "stale", 6, 1.0, staleness=2)])
    for draw in (plots.staleness, plots.step_sizes):
        of_runs = draw(runs).axes[0].containers
        assert [[bar.get_height() for bar in bars] for bars in of_runs] == [[1.0], [1.0]]
