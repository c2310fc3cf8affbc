"""What the launcher says of a run while it goes on, from files alone."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fairseq_async.launch.progress.compressed import Compressed
from fairseq_async.launch.progress.display import Display
from fairseq_async.launch.progress.progress import Progress
from fairseq_async.launch.progress.run_length import RunLength, Work
from fairseq_async.launch.synchronous import progress_in
from fairseq_async.records.validations import Validation, parse_validation


def event(worker: int, version: int, now: float, **more: Any) -> str:
    fields = {"time": now, "worker": worker, "version_after": version, "status": "applied", "weight": 100.0}
    return json.dumps(fields | {"sequence": 0, "base_version": 0, "staleness": 1, "loss": 2.0} | more) + "\n"


def begin(run_dir: Path, kept: dict[int, int], lines: str = "", time: float = 0.0) -> None:
    """What a server does that finds events: it says which of them it keeps, and replaces both files."""
    rollbacks = run_dir / "rollbacks.jsonl"
    before = rollbacks.read_text() if rollbacks.exists() else ""
    rollback = json.dumps({"time": time, "source": "a snapshot", "sequences": kept, "events": 0}) + "\n"
    for path, content in ((rollbacks, before + rollback), (run_dir / "events.jsonl", lines)):
        (run_dir / "part").write_text(content)
        (run_dir / "part").replace(path)


def test_progress_follows_the_log_and_leaves_half_a_line_for_later(tmp_path: Path) -> None:
    now = 1000.0
    path = tmp_path / "events.jsonl"
    path.write_text(event(0, 7, 900.0))  # an earlier run's
    progress = Progress(tmp_path, 2, clock=lambda: now)
    begin(tmp_path, {0: 0}, path.read_text())
    with path.open("a") as file:
        file.write(event(0, 8, 1001.0, sequence=1) + event(1, 9, 1002.0, status="refused") + event(1, 10, 1003.0)[:20])
    now = 1004.0
    progress.poll()
    assert progress.updates == {0: 1, 1: 1} and progress.version == 9 and progress.refused == 1
    assert progress.rows()[0] == ("worker 0", 1, 25.0, 1.0, 0.0, 0.0, 2.0, None)
    with path.open("a") as file:
        file.write(event(1, 10, 1003.0)[20:])
    progress.poll()
    assert progress.version == 10
    now = 2000.0
    progress.poll()
    assert progress.rows()[-1].tokens == 0.0 and "1 refused" in progress.summary()


@pytest.mark.parametrize(("seconds", "told"), [(0.5, ", server 50% busy"), (0.1, "")])
def test_a_busy_server_is_told(tmp_path: Path, seconds: float, told: str) -> None:
    now = 1000.0
    (tmp_path / "events.jsonl").write_text("")
    progress = Progress(tmp_path, 1, clock=lambda: now)
    lines = [event(0, 1 + n, 9000.0 + n, sequence=n, server_seconds=seconds) for n in range(15)]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    progress.poll()
    now = 1015.0
    assert progress.summary().endswith(f"loss 2.000{told}")


@pytest.mark.parametrize("server", [-3600.0, 3600.0], ids=["behind", "ahead"])
def test_the_clock_of_the_servers_machine_may_differ(tmp_path: Path, server: float) -> None:
    """It writes one update a second, of 100 tokens, after five of an earlier launch; then it dies, and loses one."""
    now = 1000.0
    earlier = "".join(event(0, 1 + n, 9000.0 + n + server, sequence=n) for n in range(5))
    (tmp_path / "events.jsonl").write_text(earlier)
    progress = Progress(tmp_path, 1, clock=lambda: now)
    progress.poll()
    assert progress.updates == {0: 0} and progress.version == 5, "the server has not begun yet"
    own = [event(0, 1 + n, 9100.0 + n + server, sequence=n) for n in range(4, 44)]
    begin(tmp_path, {0: 3}, "".join([*earlier.splitlines(keepends=True)[:4], *own[:20]]))
    now = 1020.0
    progress.poll()
    assert progress.updates == {0: 20} and progress.version == 24 and progress.status.startswith("update 24, ")
    assert progress.updates_per_second == pytest.approx(1.0, rel=0.1)
    begin(tmp_path, {0: 22}, "".join([*earlier.splitlines(keepends=True)[:4], *own[:19], *own[20:]]))
    now = 1040.0
    progress.poll()
    assert progress.updates == {0: 39} and progress.updates_per_second == pytest.approx(1.0, rel=0.1)


def test_events_that_no_server_has_kept_are_not_of_this_launch(tmp_path: Path) -> None:
    """A run from the beginning in the directory of an earlier one; its server dies, too, and goes on from update 2."""
    (tmp_path / "events.jsonl").write_text("".join(event(0, 1 + n, 900.0, sequence=n) for n in range(9)))
    begin(tmp_path, {0: 8}, (tmp_path / "events.jsonl").read_text())
    progress = Progress(tmp_path, 1, clock=lambda: 1000.0)
    assert progress.updates == {0: 0} and progress.version == 9
    begin(tmp_path, {})
    begin(tmp_path, {0: 0})  # before anybody has looked, the server has died and begun again
    progress.poll()
    assert progress.version == 0, "a run that is interrupted now has nothing to go on from"
    own = "".join(event(0, 1 + n, 800.0, sequence=n) for n in range(3))
    (tmp_path / "events.jsonl").write_text(own)
    begin(tmp_path, {0: 2}, own)
    progress.poll()
    assert progress.updates == {0: 3} and progress.version == 3


def test_progress_says_who_was_held_and_how_far_was_looked_ahead(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    progress = Progress(tmp_path, 2, clock=lambda: 1000.0)
    lines = [event(0, 4, 1000.0, base_version=3), event(0, 4, 1000.0, held_seconds=0.25), event(0, 5, 1000.0)]
    lines += [event(0, 5, 1000.0, held_seconds=0.75), event(1, 6, 1000.0, look_ahead=1.5)]
    path.write_text("".join(lines))
    progress.poll()
    first, second, every = progress.rows()
    assert (first.held_seconds, first.look_ahead) == (0.25, 0.0)
    assert (second.held_seconds, second.look_ahead) == (0.0, 1.5) and every.held_seconds == 0.2
    assert progress.updates_in_a_step == 2.5 and "2.5 in a step" in progress.summary()


@pytest.mark.parametrize("now", [1006.0, 1012.0, 1026.0], ids=["one step", "two steps", "older ones are dropped"])
@pytest.mark.parametrize("workers", [1, 3])
def test_steps_that_take_seconds_are_counted_with_all_their_updates(tmp_path: Path, now: float, workers: int) -> None:
    """Workers that step together every 6 seconds; the last one's update is the step."""
    clock = [1000.0]
    progress = Progress(tmp_path, workers, clock=lambda: clock[0])
    clock[0] = now
    steps = range(1, int(now - 1000.0) // 6 + 1)
    lines = [
        event(worker, step - (worker < workers - 1), 1000.0 + 6 * step, base_version=step - 1, staleness=0)
        for step in steps
        for worker in range(workers)
    ]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    progress.poll()
    assert progress.updates_in_a_step == workers
    assert progress.updates_per_second == pytest.approx(min(3, len(steps)) / min(15, now - 1000.0))


def test_the_view_of_a_compressed_run_has_bytes_per_second_ratio_and_residual_of_each_worker(tmp_path: Path) -> None:
    """A thousand parameters, 4,000 bytes in fp32: worker 0 has sent 40 and 60 of them in ten seconds."""
    now = 1000.0
    (tmp_path / "run.json").write_text(json.dumps({"method": {}, "layout": [["weight", [1000], "float32"]]}))
    progress = Progress(tmp_path, 2, clock=lambda: now)
    sizes, norms = ((0, 40), (1, 1000), (0, 60)), (0.0, 2.5, 0.5)
    lines = [
        event(worker, 1, 1000.0, bytes_sent=sent, payload="00c0ffee", residual_norm=norm)
        for (worker, sent), norm in zip(sizes, norms, strict=True)
    ]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    now = 1010.0
    progress.poll()
    first, second, every = [row.compressed for row in progress.rows()]
    assert first and first.cells(10.0) == ("0.01", "80.0", "0.5") and second and second.ratio == 4.0
    assert Compressed(5_432_100, None, None).cells(1.0) == ("5,432", "-", "-")
    assert every and (every.sent, every.residual) == (1100, 2.5)
    assert "0.11 kB/s sent, 1/10.9 of fp32, residual 2.5" in progress.summary()
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    console.print(Display(progress)._table())
    text = console.export_text()
    assert "fp32 /" in text and "80.0" in text and "residual" in text and "…" not in text


def test_the_ratio_of_a_run_in_fragments_is_that_of_each_fragment(tmp_path: Path) -> None:
    """Of 100 and of 300 parameters: updates 0 and 1 would be 400 and 1,200 bytes in fp32."""
    rows = [["a", [100], "float32"], ["b", [300], "float32"]]
    (tmp_path / "run.json").write_text(json.dumps({"method": {"options": {"fragments": 2}}, "layout": rows}))
    progress = Progress(tmp_path, 1, clock=lambda: 1000.0)
    lines = [event(0, 1, 1000.0, sequence=n, bytes_sent=sent, payload="00c0ffee") for n, sent in enumerate((100, 300))]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    progress.poll()
    [row] = [row.compressed for row in progress.rows()][:1]
    assert row and row.ratio == 4.0


def test_the_view_of_another_run_has_no_such_columns(tmp_path: Path) -> None:
    progress = Progress(tmp_path, 1, clock=lambda: 1000.0)
    (tmp_path / "events.jsonl").write_text(event(0, 1, 1000.0, bytes_sent=4000))
    progress.poll()
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    console.print(Display(progress)._table())
    assert "sent" not in console.export_text() + progress.summary()


@pytest.mark.parametrize(
    ("method", "framework", "shown"),
    [
        ("hybrid_async", {"inner_optimizer": {"_name": "adam"}}, "20 tokens/s"),
        ("local_sgd", {"inner_optimizer": {"_name": "adam"}}, "20 tokens/s"),
        ("local_sgd", {}, "20 local steps/s"),
        ("hybrid_async", {}, ""),
    ],
    ids=["fairseq", "local SGD in fairseq", "local SGD elsewhere", "gradients elsewhere"],
)
def test_a_speed_is_in_what_the_weights_of_the_updates_count(
    tmp_path: Path, method: str, framework: dict[str, Any], shown: str
) -> None:
    described = {"method": method, "workers": 1, "options": {}, "framework": framework}
    (tmp_path / "run.json").write_text(json.dumps({"workers": 1, "method": described, "layout": []}))
    now = 1000.0
    progress = Progress(tmp_path, 1, clock=lambda: now)
    (tmp_path / "events.jsonl").write_text(event(0, 1, 1000.0, weight=100.0))
    now = 1005.0
    progress.poll()
    assert shown in progress.summary() and ("tokens" in progress.summary()) == ("tokens" in shown)
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    console.print(Display(progress)._table())
    heading = next(line for line in console.export_text().splitlines() if "staleness" in line and "┃" in line)
    assert ("tokens/s" in heading, "local steps/s" in heading) == ("tokens" in shown, "local" in shown)


def test_progress_begins_again_where_a_restart_has_put_another_file_and_lives_through_bad_lines(tmp_path: Path) -> None:
    """The new file may be longer than the old one before anybody looks: an offset into it would be amid a line."""
    path = tmp_path / "events.jsonl"
    progress = Progress(tmp_path, 2, clock=lambda: 1000.0)
    path.write_text(event(0, 1, 1000.0) + event(1, 2, 1000.0) + event(0, 3, 1000.0))
    progress.poll()
    assert progress.updates == {0: 2, 1: 1} and progress.version == 3
    kept = event(0, 1, 1000.0) + "no event at all\n" + "".join(event(1, version, 1000.0) for version in range(2, 9))
    (tmp_path / "events.jsonl.part").write_text(kept)
    (tmp_path / "events.jsonl.part").replace(path)
    progress.poll()
    assert progress.updates == {0: 1, 1: 7} and progress.version == 8
    progress.poll()
    assert progress.updates == {0: 1, 1: 7} and progress.version == 8


def test_a_server_that_starts_again_in_a_new_directory_has_not_begun_another_launch(tmp_path: Path) -> None:
    """Its first start has found no events, and has said nothing of what it keeps: the second one does."""
    progress = Progress(tmp_path, 2, clock=lambda: 1000.0)
    (tmp_path / "events.jsonl").write_text(event(0, 1, 1000.0) + event(1, 2, 1000.0))
    progress.poll()
    begin(tmp_path, {0: 0, 1: 0}, event(0, 1, 1000.0) + event(1, 2, 1000.0))
    progress.poll()
    assert progress.updates == {0: 1, 1: 1} and progress.version == 2


def test_before_the_first_update_it_says_what_the_server_has_said_last(tmp_path: Path) -> None:
    """But not that a worker has died, before the launcher says why."""
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "server.log"
    log.write_text("2026-01-01 10:00:00 | the run is finished at version 9\n")  # an earlier run's
    progress = Progress(tmp_path, 2, clock=lambda: 1000.0)
    assert progress.status == "starting: the processes start"
    with log.open("a") as file:
        file.write("2026-01-01 10:00:01 | worker 0 has joined, 1 of 2 are there\n")
        file.write("INFO:a_library:imported\n2026-01-01 10:00:02 | worker 0 is gone\n")
    assert progress.status == "starting: worker 0 has joined, 1 of 2 are there"
    (tmp_path / "events.jsonl").write_text(event(0, 1, 1000.0))
    progress.poll()
    assert progress.status.startswith("update 1, ")


def test_the_position_has_update_epoch_and_time_left_at_the_speed_so_far(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ten of a hundred updates in two seconds: the eighty that are left take sixteen."""
    now = 1000.0
    monkeypatch.setattr(RunLength, "read", lambda _: RunLength(2, steps=100, max_epoch=8))
    progress = Progress(tmp_path, 2, clock=lambda: now)
    path = tmp_path / "events.jsonl"
    assert not progress.begun
    path.write_text(event(0, 10, 1000.0, epochs=0.75))
    progress.poll()
    assert progress.begun
    now = 1002.0
    with path.open("a") as file:
        file.write(event(1, 20, 1002.0, epochs=0.75))
    progress.poll()
    assert progress.position + progress.time_left == "update 20 of 100, epoch 2 of 8, 0:00:16 left"
    now = 2000.0
    progress.poll()
    assert progress.time_left == ", 0:00:16 left", "it does not grow while nothing new comes, as after a stop"
    assert progress.result() == "update 20 of 100, epoch 2 of 8"  # no rates: nothing has come in the last seconds


def test_a_time_left_is_said_of_a_run_that_goes_on_and_of_more_than_a_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rates of the whole view are over the time since its first update."""
    monkeypatch.setattr(RunLength, "read", lambda _: RunLength(1, steps=100))
    now, path = [1000.0], tmp_path / "events.jsonl"
    path.write_text(event(0, 10, 5000.0))
    progress = Progress(tmp_path, 1, clock=lambda: now[0], whole=True)
    for seconds, left in ((1.0, ""), (2.0, ", 0:00:16 left")):
        with path.open("a") as file:
            file.write(event(0, 20 if seconds > 1 else 15, 5000.0 + seconds, sequence=int(seconds)))
        now[0] = 1000.0 + seconds
        progress.poll()
        assert progress.time_left == left
    now[0] += 8.0
    assert progress.seconds == 10.0 and progress.rows()[-1].tokens == pytest.approx(30.0)


def test_the_night_before_a_resumption_is_no_part_of_the_time_left_of_the_whole_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One update in two seconds, before and after; the server's update of version 30 is lost when it is stopped."""
    monkeypatch.setattr(RunLength, "read", lambda _: RunLength(1, steps=100))
    path, kept = tmp_path / "events.jsonl", event(0, 10, 1000.0) + event(0, 20, 1002.0, sequence=1)
    path.write_text(kept + event(0, 30, 1004.0, sequence=2))
    progress = Progress(tmp_path, 1, clock=lambda: 50000.0, whole=True)
    assert progress.time_left == ", 0:00:14 left"
    begin(tmp_path, {0: 1}, kept, time=40000.0)  # this server dies before it has taken an update
    progress.poll()
    begin(tmp_path, {0: 1}, kept, time=50000.0)
    with path.open("a") as file:
        file.write(event(0, 30, 50002.0, sequence=2) + event(0, 40, 50004.0, sequence=3))
    progress.poll()
    assert progress.time_left == ", 0:00:12 left"
    assert Progress(tmp_path, 1, clock=lambda: 50004.0, whole=True).time_left == ", 0:00:12 left"


@pytest.mark.parametrize(
    ("length", "work", "words"),
    [
        (RunLength(4), Work(updates=8, version=8), "update 8"),
        (RunLength(4, steps=5000), Work(updates=8, version=1200), "update 1,200 of 5,000"),
        (RunLength(4, steps=10, partial=True), Work(updates=8, version=5), "update 2 of 10"),
        (RunLength(2, steps=10, partial=True, optimizers=2), Work(updates=12, version=7), "update 3 of 10"),
        (RunLength(1, steps=10, optimizers=2), Work(updates=28, version=28), "update 10 of 10"),
        (RunLength(2, steps=50, local=True), Work(updates=2, version=2, local_steps=30), "step 15 of 50"),
        (RunLength(2, max_epoch=3), Work(updates=4, version=4, epochs=2.5), "update 4, epoch 3 of 3"),
        (RunLength(2, max_epoch=3), Work(updates=5, version=5, epochs=3.0), "update 5, epoch 3 of 3"),
        (RunLength(2, max_epoch=3), Work(updates=10, version=10, epochs=sum([0.1] * 10)), "update 10, epoch 2 of 3"),
    ],
    ids=[
        "no end",
        "steps of the server",
        "partial steps",
        "two optimizers",
        "one twice",
        "local steps",
        "epochs",
        "the end",
        "a sum of parts that is below 1",
    ],
)
def test_how_far_a_run_is_counts_in_the_unit_of_its_end(length: RunLength, work: Work, words: str) -> None:
    assert length.describe(work) == words
    part = {"update 8": 0.0, "update 1,200 of 5,000": 0.24, "update 2 of 10": 0.2, "step 15 of 50": 0.3}
    part |= {"update 3 of 10": 0.3, "update 10 of 10": 1.0, "update 5, epoch 3 of 3": 1.0}
    part |= {"update 10, epoch 2 of 3": 1 / 3}
    assert length.fraction(work) == pytest.approx(part.get(words, 2.5 / 3))


@pytest.mark.parametrize("loss", [None, math.nan])
def test_a_validation_without_a_finite_loss_has_a_line_too(tmp_path: Path, loss: float | None) -> None:
    Validation(1.0, 20, 3, loss).append(tmp_path)
    (line,) = (tmp_path / "validations.jsonl").read_bytes().splitlines()
    assert parse_validation(line) == Validation(1.0, 20, 3, None)


def test_the_last_validation_is_shown_with_its_score(tmp_path: Path) -> None:
    progress = Progress(tmp_path, 1, clock=lambda: 1000.0)
    (tmp_path / "events.jsonl").write_text(event(0, 1, 1000.0))
    progress.poll()
    assert "validation" not in progress.summary()
    Validation(1000.0, 1200, 3, 2.5, "bleu", 31.25).append(tmp_path)
    progress.poll()
    assert "validation at update 1,200: loss 2.500, bleu 31.25" in progress.summary()
    Validation(1000.5, 1250, 3, 2.5, "bleu", 0.0).append(tmp_path)
    progress.poll()
    assert "loss 2.500, bleu 0.00" in progress.summary()
    Validation(1001.0, 1300, 3, 2.25).append(tmp_path)
    progress.poll()
    assert progress.summary().endswith("validation at update 1,300: loss 2.250")


def test_where_no_worker_reports_a_loss_none_is_shown(tmp_path: Path) -> None:
    """Nor by a gradient without any token, whose loss is of nothing."""
    progress = Progress(tmp_path, 2, clock=lambda: 1000.0)
    display = Display(progress)
    path = tmp_path / "events.jsonl"
    path.write_text(event(0, 1, 1000.0, loss=None) + event(1, 1, 1000.0, weight=0.0))
    progress.poll()
    assert [row.loss for row in progress.rows()] == [None, None, None] and "loss" not in progress.summary()
    with path.open("a") as file:
        file.write(event(1, 2, 1000.0, loss=1.5))
    progress.poll()
    console = Console(width=150)
    with console.capture() as captured:
        console.print(display._table())
    shown = [line.split("│")[-2].strip() for line in captured.get().splitlines() if "worker" in line]
    assert shown == ["", "1.500"]


def test_the_progress_of_ranks_is_that_of_the_last_whole_line_of_their_log(tmp_path: Path) -> None:
    """fairseq may be in the middle of a line."""
    line = '2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "loss": "2.5", "num_updates": "%d"}\n'
    (tmp_path / "log").write_text(line % 5 + (line % 10)[:-20])
    assert progress_in(tmp_path / "log") == "num_updates 5, loss 2.5"
