"""Which servers, local steps and fragments a cluster needs."""

import re
from pathlib import Path
from typing import Any

import pytest

from fairseq_async.errors import ConfigurationError
from fairseq_async.reporting.capacity_question import read_question
from fairseq_async.simulation.cluster import Cluster
from fairseq_async.simulation.costs import Costs, NetworkLink
from scripts.bench.server_queue import Exchanges, ServerQueue
from scripts.bench.sizing import Sizing, answer, main
from tests.helpers.run_files import write_timed_run

FAST = NetworkLink(1000)


def said(
    run_dir: Path | None = None,
    workers: int = 8,
    step_seconds: str = "",
    at_most_waiting: float = 0.05,
    shards: str = "1,2,4,8,16,32,64",
    **flags: Any,
) -> list[str]:
    question = read_question(**{"parameters": "", "link": "", "apart": False, "compress": ""} | flags, shards=shards)
    parts = answer(run_dir, question, workers, step_seconds, at_most_waiting)
    return [part for part in parts if isinstance(part, str)]


def sizing(workers: int, costs: Costs, most: float = 0.05) -> Sizing:
    return Sizing(Cluster(workers=workers), costs, costs, most)


def test_the_fewest_shards_that_fit_are_named() -> None:
    """16 workers of a second want 1.6 seconds of the server each second: two shards are busy 80% of the time."""
    rows = sizing(16, Costs(1.0, 0.1, 0.1, 1000), most=0.06).rows([1, 2, 4])
    one, two, four = (row.gradients for row in rows)
    assert one.waiting == pytest.approx(1 - 10 / 16, abs=0.01) and two.server == pytest.approx(0.8, abs=0.05)
    assert one.waiting > 0.06 >= two.waiting > four.waiting
    lines = said(workers=16, parameters="1e7", step_seconds="1", at_most_waiting=0.14)
    assert "gradients at every step need a server in 2 shards" in lines[0]
    assert any("share its link" in line for line in lines) and any("is assumed: 10 ns" in line for line in lines)


def test_shards_on_machines_of_their_own_divide_the_servers_link() -> None:
    """16 workers of a second send 40 MB each second over lines of 100 MB/s: 6.4 of them."""
    question = {"workers": 16, "parameters": "1e7", "step_seconds": "1", "link": "0.8", "at_most_waiting": 0.6}
    here, apart = said(**question, shards="1,8"), said(**question, shards="1,8", apart=True)
    assert "even with a server in 8 shards" in here[0] and any("share its link" in line for line in here)
    assert "gradients at every step need a server in 8 shards" in apart[0]
    assert any("a link of its own" in line for line in apart)


def test_local_steps_are_the_fewest_with_which_workers_wait_little() -> None:
    """Alone, an exchange of a second after H steps of one is 1/(H + 1) of the time: 5% with H = 19, 3% with 32."""
    costs = Costs(1.0, 1.0, 0.001, 1000)
    (row,) = sizing(2, costs).rows([1])
    assert row.whole is not None and row.whole.exchanges == Exchanges(local_steps=32)
    assert row.whole.load.waiting == pytest.approx(1 / 33, abs=0.003)
    half = ServerQueue(Cluster(workers=2), costs, Exchanges(local_steps=16)).run()
    assert half.waiting > 0.05


def test_fragments_need_fewer_local_steps() -> None:
    """Half of a second is hidden behind the step that goes on: two steps, one fragment after each."""
    (row,) = sizing(2, Costs(1.0, 1.0, 0.001, 1000)).rows([1])
    assert row.in_fragments is not None and row.in_fragments.exchanges == Exchanges(2, fragments=2, delay=1)


def test_what_the_default_method_waits_for_is_said_beside_plain_asynchronous_sgd() -> None:
    """With a spread of 30%, 16 workers that step together wait for the slowest of them."""
    question = {"workers": 16, "parameters": "1e6", "shards": "1"}
    lines = said(**question, step_seconds="1:0.3")
    assert "one server (1.3% waiting)" in lines[0]
    assert "38% waiting" in lines[1] and "staleness 0.5 in place of 15.0, on one server" in lines[1]
    equal = said(**question, step_seconds="1")[1]
    assert "staleness 0.0 in place of 15.0" in equal
    assert not any("By default" in line for line in said(**question | {"workers": 1}, step_seconds="1"))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (
            {"parameters": "1e9", "link": "10", "workers": 1},
            "for a worker's own link: 6.4 s of every update, after 1 s of computing",
        ),
        ({"parameters": "1e9", "link": "10"}, "after 1 s of computing, and for the server's link, in"),
        ({"parameters": "1e3", "link": "1000:200"}, "for the latency: 0.4 s of every update"),
        ({"parameters": "1e8", "shards": "1"}, "even with one server, for the server's time: 1 s of every update"),
        ({"parameters": "4e6", "shards": "1", "workers": 200}, "even with one server, for the server's processor"),
        ({"parameters": "1e6", "link": "2.5", "shards": "1", "workers": 200}, "for the server's link, in"),
    ],
)
def test_where_nothing_fits_the_bottleneck_is_named(flags: dict[str, Any], why: str) -> None:
    line = said(**{"workers": 8, "step_seconds": "1"} | flags)[0]
    assert why in line and "gradients at every step wait" in line


def test_a_run_gives_seconds_and_costs(tmp_path: Path) -> None:
    """Workers of 0.9 s, 0.1 s of exchange, 0.05 s of it the server's: 30 of them keep one shard and a half busy."""
    run = write_timed_run(tmp_path, workers=2, step=0.9, exchange=0.1, server=0.05)
    line = said(run, workers=30, at_most_waiting=0.12)[0]
    where = "30 workers, 1,000 parameters, one machine"
    assert line.startswith(f"{where}: gradients at every step need a server in 2 shards")
    twice = said(run, workers=30, parameters="2000", at_most_waiting=0.12)[0]
    assert twice.replace("2,000", "1,000") == line, "all times are in proportion"
    quick = said(run, workers=30, step_seconds="0.09", at_most_waiting=0.12)[0]
    assert "gradients at every step wait" in quick


def test_compressed_updates_are_shorter_on_the_link() -> None:
    plain, coded = (
        said(workers=8, parameters="1e6", link="0.1", step_seconds="1", compress=codec, shards="1")[0]
        for codec in ("", "int8,pull=int8")
    )
    assert "0.64 s of every update" in plain and "0.16" in coded


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({}, "--workers 8: without RUN_DIR, nothing says what they train: give --parameters"),
        ({"parameters": "9"}, "--workers 8: without RUN_DIR, nothing says what they train: give --step-seconds"),
        ({"parameters": "9", "step_seconds": "1", "at_most_waiting": 1.0}, "--at-most-waiting 1: a share of"),
        ({"parameters": "9", "step_seconds": "1:9"}, "--step-seconds 1:9: numbers above 0 with commas"),
    ],
)
def test_a_question_that_cannot_be_answered_is_one_line(flags: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(line)):
        said(**flags)


def test_the_command_answers_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(4, parameters="1e6", link="10,100", step_seconds="1:0.2,3", shards="1,2")
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("need one server (") == 2 and "100 Gbit/s: waiting 5% at most" in out
    with pytest.raises(SystemExit) as ended:
        main(4, Path("none"))
    assert ended.value.code == 2 and "none: no run that can be read there" in capsys.readouterr().err
