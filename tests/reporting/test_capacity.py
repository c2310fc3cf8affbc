"""How many workers a server holds, and the live view of a run, from files alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fairseq_async.cli.inspect import capacity
from fairseq_async.errors import ConfigurationError
from fairseq_async.reporting.capacity import answer, measure
from fairseq_async.reporting.capacity_question import read_question
from fairseq_async.reporting.watch import WatchedRun, follow
from fairseq_async.simulation.costs import Costs, NetworkLink
from tests.helpers.run_files import TIMED_LAYOUT, write_timed_run

WITHOUT_TIMES = (
    '{"time": 1, "worker": 0, "sequence": 0, "base_version": 0, "staleness": 0, "weight": 1, "version_after": 1, '
    '"status": "applied"}\n'
)


def test_costs_are_read_off_a_run(tmp_path: Path) -> None:
    found = measure(write_timed_run(tmp_path, workers=2, step=0.9, exchange=0.1, server=0.05))
    assert found.workers == 2 and found.costs.parameters == 1000
    assert (found.costs.step, found.costs.exchange, found.costs.server) == pytest.approx((0.9, 0.1, 0.05), abs=1e-5)
    assert found.updates_per_second == pytest.approx(2.0, rel=1e-5)
    assert found.costs.updates_per_second(2) == pytest.approx(2.0, rel=1e-5)


def test_the_first_two_updates_of_a_worker_are_no_measure_and_five_exchanges_are_enough(tmp_path: Path) -> None:
    """They touch memory for the first time."""
    run = write_timed_run(tmp_path, workers=1, step=0.9, exchange=0.1, server=0.05, updates=8)
    events = [json.loads(line) for line in (run / "events.jsonl").open()]
    for first in events[1:3]:
        first["server_seconds"] = 1.0
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert measure(run).costs.server == pytest.approx(0.05, abs=1e-5)
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events[:-1]))
    with pytest.raises(ConfigurationError, match="7 updates are too few to measure costs by"):
        measure(run)


def test_every_nth_update_that_waits_for_a_step_counts_for_its_share(tmp_path: Path) -> None:
    """N = 4: three updates are answered after a millisecond, the fourth after 41, of which the server takes 40."""
    run = write_timed_run(tmp_path, workers=1, step=0.02, exchange=0.001, server=0.001, updates=42)
    at, events = 1e9, [json.loads(line) for line in (run / "events.jsonl").open()]
    for number, event in enumerate(events):
        steps = number % 4 == 0  # an event has the times of the exchange before it
        at += 0.061 if steps else 0.021
        event |= {"time": at, "version_after": (number + 1) // 4, "pull_seconds": 0.0}
        event |= {"push_seconds": 0.041 if steps else 0.001, "server_seconds": 0.04 if steps else 0.001}
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = measure(run)
    assert found.updates_per_second == pytest.approx(4 / (0.061 + 3 * 0.021), rel=0.02)
    assert found.costs.exchange == pytest.approx(0.011, rel=0.05) and found.costs.step == pytest.approx(0.02, rel=0.02)
    assert replace(found.costs, shards=8).alone > found.costs.step


def test_what_was_held_for_others_is_no_cost(tmp_path: Path) -> None:
    """Two workers of steps that close: the first waits half a second in each for the other."""
    run = write_timed_run(tmp_path, workers=1, step=1.4, exchange=0.1, server=0.05)
    description = json.loads((run / "run.json").read_text())
    description["method"] |= {"barrier": 2, "closes_early": True}
    (run / "run.json").write_text(json.dumps(description))
    events = [json.loads(line) for line in (run / "events.jsonl").open()]
    waits, at = [(0.5, 0.3, 0.5, 0.7)[number % 4] for number in range(len(events))], 0.0
    held = []
    for event, before, wait in zip(events, [0.0, *waits], waits, strict=False):
        at += 1.0 + wait
        held.append(event | {"time": at, "held_seconds": wait, "push_seconds": 0.075 + before})
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in held))
    found = measure(run)
    assert (found.costs.step, found.costs.exchange, found.costs.server) == pytest.approx((0.9, 0.1, 0.05), abs=1e-5)
    assert found.updates_per_second == pytest.approx(1 / 1.5, rel=1e-5)


def test_workers_add_up_until_the_server_is_busy_all_the_time() -> None:
    costs = Costs(step=0.9, exchange=0.1, server=0.05, parameters=1000)
    assert costs.workers_held == pytest.approx(20.0)
    assert [costs.updates_per_second(k) for k in (1, 10, 20, 10_000)] == pytest.approx([1.0, 10.0, 20.0, 20.0])


def test_a_link_costs_the_worker_both_ways_and_the_server_one_at_a_time() -> None:
    linked = Costs(step=0.9, exchange=0.1, server=0.05, parameters=1000, link=4 * 1000 / 0.2)
    assert linked.alone == pytest.approx(0.9 + 0.1 + 2 * 0.2) and linked.busiest == pytest.approx(0.2)
    assert linked.workers_held == pytest.approx(7.0)


def compressed(run: Path, compress: object, sent: int) -> Path:
    """The run as if its updates had had so many bytes."""
    description = json.loads((run / "run.json").read_text())
    description["method"] |= {"options": {"compress": compress}}
    (run / "run.json").write_text(json.dumps(description))
    events = [json.loads(line) | {"bytes_sent": sent, "payload": "00c0ffee"} for line in (run / "events.jsonl").open()]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_the_link_is_as_busy_as_the_longer_way_takes() -> None:
    """Up 0.05 s and down 0.2, or 0.1 with half the bytes of a parameter."""
    linked = Costs(step=0.9, exchange=0.1, server=0.05, parameters=1000, link=4 * 1000 / 0.2, push=1.0)
    assert linked.alone == pytest.approx(0.9 + 0.1 + 0.05 + 0.2) and linked.busiest == pytest.approx(0.2)
    both = replace(linked, pull=2.0)
    assert both.alone == pytest.approx(0.9 + 0.1 + 0.05 + 0.1) and both.busiest == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("codec", "size", "known"),
    [
        ("int8", 32 + 4 + 4 * 4 + 1000, "exact"),
        ("e3m0:block=100", 32 + 4 + 4 * 10 + 500, "exact"),
        # one chunk: levels in 4 bytes, 64 places of 12 bits and 64 codes of 2
        ("topk", 32 + 12 + 4 + 96 + 16, "exact"),
        # two bins, scale 4, counts 2 x 2; 40 places of 2 bytes and 40 signs
        ("adacomp", 32 + 4 + 4 + 4 + 80 + 5, "assumed: each bin sends 20 of its 500 values"),
        # 32 bins with a byte each; 128 values of 7 bits
        ("adacomp:bin_size=32,scale=bin", 32 + 4 + 6 + 32 + 112, "assumed: each bin sends 4 of its 32 values"),
        ("dqsgd:bits=6", 32 + 1 + 4 + 750, "assumed: 6 bits a value, as at first"),
        ("none", 4000, "exact"),
    ],
)
def test_a_codec_says_its_bytes_or_what_they_assume(tmp_path: Path, codec: str, size: int, known: str) -> None:
    found = measure(write_timed_run(tmp_path, workers=1, step=0.9, exchange=0.1, server=0.05), codec)
    assert (found.exchange.push.size, found.exchange.push.known) == (size, known)
    assert (found.costs.push, found.costs.pull) == (size / 1000, 4.0)


def test_a_compressed_run_has_the_bytes_that_it_sent(tmp_path: Path) -> None:
    run = write_timed_run(tmp_path / "run", workers=1, step=0.9, exchange=0.1, server=0.05)
    compressed(run, {"push": "adacomp", "pull": "bf16"}, sent=80)
    first, second, *others = [json.loads(line) for line in (run / "events.jsonl").open()]
    others[0] |= {"payload": None, "bytes_sent": 4000}  # worker 0's first parameters are in fp32
    lines = [first | {"bytes_sent": 60}, second | {"bytes_sent": 100}, *others]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measure(run)
    push = found.exchange.push
    assert (push.codec, push.known, found.costs.push, found.costs.pull) == ("adacomp", "mean of the run", 0.08, 2.032)
    console = Console(width=160, record=True, file=(tmp_path / "out").open("w"))
    for table in answer(run, read_question("", "1", "1", False, "")):
        console.print(table)
    assert "50.0" in console.export_text() and measure(run, "none").costs.push == 4
    with pytest.raises(ConfigurationError, match="run.json: \"compress\": there is no codec 'int7'"):
        measure(compressed(run, "int7", sent=80))


@pytest.mark.parametrize("codec", ["int7", "int8:keep=3", "sketch"])
def test_a_codec_that_is_none_is_one_line(tmp_path: Path, codec: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--compress {codec}: ") as caught:
        measure(write_timed_run(tmp_path, workers=1, step=0.9, exchange=0.1, server=0.05), codec)
    assert "\n" not in str(caught.value)


def test_a_codec_without_a_link_is_refused(tmp_path: Path) -> None:
    run = write_timed_run(tmp_path, workers=1, step=0.9, exchange=0.1, server=0.05)
    with pytest.raises(ConfigurationError, match="--compress int8: of use on a link alone: give --link too"):
        capacity(run, compress="int8")
    with pytest.raises(ConfigurationError, match="--apart: machines exchange over a link: give --link too"):
        capacity(run, apart=True)


def test_shards_divide_the_servers_work_but_no_link() -> None:
    sharded = Costs(step=0.9, exchange=0.1, server=0.05, parameters=1000, shards=5)
    assert sharded.alone == pytest.approx(0.96) and sharded.busiest == pytest.approx(0.01)
    linked = Costs(step=0.9, exchange=0.1, server=0.05, parameters=1000, link=4 * 1000 / 0.2, shards=5)
    assert linked.alone == pytest.approx(0.96 + 0.4) and linked.busiest == pytest.approx(0.2)
    over = sharded.over(NetworkLink(gigabits=8.0, milliseconds=5.0))
    assert (over.link, over.latency, over.pushing) == (1e9, 0.005, 4000 / 1e9)
    late = replace(sharded, latency=0.01)
    assert late.alone == pytest.approx(0.96 + 2 * 0.01), "they share a line"
    assert replace(late, apart=True).alone == pytest.approx(0.96 + 4 * 0.01)
    assert replace(linked, apart=True).busiest == pytest.approx(0.2 / 5), "each has a line of its own"


def test_a_run_in_shards_says_what_one_process_would_take(tmp_path: Path) -> None:
    run = write_timed_run(tmp_path, workers=1, step=0.9, exchange=0.1, server=0.05)
    described = json.loads((run / "run.json").read_text())
    described["method"]["server"] = {"server_shards": 2}
    (run / "run.json").write_text(json.dumps(described))
    costs = measure(run).costs
    assert costs.shards == 2 and costs.server == pytest.approx(0.1) and costs.exchange == pytest.approx(0.15)
    assert costs.alone == pytest.approx(1.0) and costs.busiest == pytest.approx(0.05)


def test_another_model_costs_in_proportion() -> None:
    twice = Costs(step=0.9, exchange=0.1, server=0.05, parameters=1000).of_size(2000)
    assert (twice.step, twice.exchange, twice.server) == pytest.approx((1.8, 0.2, 0.1))


def test_the_tables_have_a_row_for_each_model_and_link_and_number_of_workers(tmp_path: Path) -> None:
    console = Console(width=160, record=True, file=(tmp_path / "out").open("w"))
    run = write_timed_run(tmp_path / "run", workers=1, step=0.9, exchange=0.1, server=0.05)
    log = run / "events.jsonl"
    log.write_text(log.read_text().replace("{", '{"micro_batches": 6, '))
    for table in answer(run, read_question("1000,20000", "1,10", "1,4", False, "")):
        console.print(table)
    text = console.export_text()
    assert "micro-batches of each worker's last gradient: 6" in text
    assert text.count("Gbit/s") == 4 + 4 and "20,000" in text and "10,000" in text and "4 shards" in text


def test_the_table_of_what_was_measured_has_each_workers_micro_batches_and_ranks(tmp_path: Path) -> None:
    """Of workers 0 and 3; the first has ended with six micro-batches and two ranks."""
    run = write_timed_run(tmp_path / "run", workers=2, step=0.9, exchange=0.1, server=0.05)
    lines = [json.loads(line) for line in (run / "events.jsonl").open()]
    plain = measure(run)
    assert (plain.numbers, plain.micro_batches, plain.ranks, plain.server_spread) == ((0, 1), (), (), 0.0)
    for line in lines:
        own = {"micro_batches": 4 + line["sequence"] // 10 * 2, "ranks": 2}
        line |= {"worker": 3} if line["worker"] else own
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measure(run)
    assert (found.numbers, found.micro_batches, found.ranks, found.workers) == ((0, 3), (6, None), (2, 1), 2)
    table, *others = answer(run, read_question("", "", "1,2", False, ""))
    assert table.caption == "micro-batches of each worker's last gradient: 6, None; its ranks: 2, 1"
    assert [list(column.cells) for column in table.columns] == [
        [each] for each in ("1,000", "0.9000", "0.1000", "0.0500", "2", "2.00", "2.00")
    ]
    held, speedup = others
    assert [list(column.cells) for column in held.columns] == [["1,000"], ["as measured"], ["20"], ["39"]]
    assert [column.header for column in speedup.columns] == ["workers", "as measured, 1 shard", "as measured, 2 shards"]
    workers = ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1,024", "2,048", "4,096", "10,000"]
    assert list(speedup.columns[0].cells) == workers
    assert list(speedup.columns[1].cells)[:6] == ["1.0", "2.0", "4.0", "8.0", "16.0", "20.0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "run.json").unlink(), "no run that can be read there"),
        (lambda run: (run / "events.jsonl").write_text(""), "too few to measure costs by"),
        (
            lambda run: (run / "events.jsonl").write_text(WITHOUT_TIMES),
            "no measured times of the server in events.jsonl; give a run of",
        ),
        (lambda run: (run / "events.jsonl").write_text('{"worker": 0}\n'), "line 1: not a line of fairseq-async: time"),
        (
            lambda run: (run / "run.json").write_text(json.dumps({"method": {"barrier": 2}, "layout": TIMED_LAYOUT})),
            "a run with a barrier says nothing of what an exchange costs by itself; give one without",
        ),
        *(
            (
                lambda run, given=given: (run / "run.json").write_text(
                    json.dumps({"method": {"barrier": 0, "options": given}, "layout": TIMED_LAYOUT})
                ),
                "its workers compute while they exchange: give a run without overlap and fragments",
            )
            for given in ({"overlap": True}, {"fragments": 4}, {"fragment_delay": 1})
        ),
    ],
)
def test_a_run_that_says_too_little_is_one_line(tmp_path: Path, change: Any, message: str) -> None:
    run = write_timed_run(tmp_path, workers=1, step=0.9, exchange=0.1, server=0.05)
    change(run)
    with pytest.raises(ConfigurationError) as caught:
        measure(run)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_is_watched_by_its_own_clock(tmp_path: Path) -> None:
    now = [100.0]
    run = write_timed_run(tmp_path, workers=2, step=0.9, exchange=0.1, server=0.05, updates=30)
    watched = WatchedRun(run, lambda: now[0])
    watched.poll()
    every = watched.rows()[-1]
    assert (every.name, every.updates, every.staleness, every.loss) == ("all", 60, 0.0, 2.0)
    assert every.tokens == pytest.approx(20.0, rel=0.1)
    assert "nothing new" not in watched.summary()
    now[0] += 10
    assert "nothing new" not in watched.summary()
    now[0] += 1
    assert "nothing new for 11 s" in watched.summary()
    now[0] += 34
    watched.poll()
    assert "nothing new for 45 s" in watched.summary() and watched.rows()[-1].tokens == 0.0
    with (run / "events.jsonl").open("a") as log:
        last = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
        log.write(json.dumps(last | {"time": last["time"] + 1, "status": "refused", "worker": 5}) + '\n{"half')
    watched.poll()
    assert watched.refused == 1 and watched.updates[5] == 1 and "1 refused" in watched.summary()


def test_the_view_of_a_finished_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its log may have an earlier end, after which the run went on for more updates."""
    run = write_timed_run(tmp_path, workers=1, step=0.9, exchange=0.1, server=0.05, updates=30)
    begins, ends = "2026-11-27 10:00:00 | the server listens at 127.0.0.1:1 for 1 workers\n", "10:00:01 | the run is "
    log = run / "logs" / "server.log"
    log.parent.mkdir()
    log.write_text(f"{begins}{ends}finished at version 10\n{begins}")
    watched = WatchedRun(run)
    assert not watched.finished
    with log.open("a") as file:
        file.write(f"{ends}finished at version 30\n10:00:02 | worker 0 has left\n")
    watched.poll()
    assert watched.finished
    follow(run)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"finished: {watched.result()}"


def test_an_empty_directory_is_not_watched(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no run that can be read there"):
        WatchedRun(tmp_path)


@pytest.mark.parametrize("gradients", [4, 16])
def test_the_servers_steps_count_however_rare_they_are(tmp_path: Path, gradients: int) -> None:
    """A step of 20 ms after so many gradients of 1 ms each; the slowest tenth of what is alike is no part of it."""
    run = write_timed_run(tmp_path, workers=1, step=0.1, exchange=0.02, server=0.001, updates=400)
    events = [json.loads(line) for line in (run / "events.jsonl").open()]
    for number, event in enumerate(events):
        event["version_after"] = (number + 1) // gradients
        event["server_seconds"] = 0.001 if number % gradients else 0.02  # of the update before
    events[7]["server_seconds"] = events[200]["server_seconds"] = 9.0  # another program ran
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert measure(run).costs.server == pytest.approx((0.02 + (gradients - 1) * 0.001) / gradients, rel=0.05)


def test_the_live_view_is_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe or a file gets it; on stderr it would be lost there."""
    run = write_timed_run(tmp_path, workers=1, step=0.9, exchange=0.1, server=0.05)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fairseq_async.reporting.watch.time.sleep", interrupt)
    follow(run)
    assert "update" in capsys.readouterr().out
