"""What ``fairseq-async ray`` asks a cluster for, and what it says before it asks one."""

import sys

import pytest

from fairseq_async import cli
from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.ray.registry import NodeAddress, Registry
from fairseq_async.launch.ray.resources import Resources, check_shards, parse_change, parse_workers
from fairseq_async.worker.start.rendezvous import ServerRequest


def test_groups_of_workers_are_written_as_products() -> None:
    expected = [Resources(1, 1)] * 4 + [Resources(4, 0)] * 2
    assert parse_workers("4*GPU,2*CPU:4") == expected
    assert parse_workers("1*GPU:2") == [Resources(1, 2)]


@pytest.mark.parametrize("text", ["4*TPU", "", "0*CPU", "2*CPU:0", "CPU", "2*CPU:4:1", "2 CPU"])
def test_groups_that_are_none_are_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r'--workers ".*": groups COUNT\*CPU or COUNT\*GPU'):
        parse_workers(text)


def test_shards_on_other_nodes_are_for_fairseq_and_for_what_needs_no_whole_model() -> None:
    job = ["fairseq-train", "data", "--optimizer", "local_sgd"]
    check_shards([*job, "--server-shards", "2"], 3)
    check_shards([*job, "--compress", "int8"], 1)
    with pytest.raises(ConfigurationError, match="--compress does not go with .* --server-shards 3 instead"):
        check_shards([*job, "--compress=int8"], 3)


@pytest.mark.parametrize("words", [[], ["2"], ["+0"], ["+2", "-1"], ["more"]])
def test_a_change_has_a_sign(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"as \+2 or -1"):
        parse_change(words)
    assert (parse_change(["+2"]), parse_change(["-1"])) == (2, -1)


def test_a_worker_on_the_servers_node_shares_its_memory() -> None:
    place = NodeAddress("10.0.0.1", 29400)
    assert place.address("10.0.0.1") == "127.0.0.1:29400" and place.address("10.0.0.2") == "10.0.0.1:29400"


def test_the_registry_takes_those_that_came_last_and_never_worker_0() -> None:
    registry = Registry("secret", 2)
    assert registry.scale(2) == "" and registry.state().workers == [0, 1, 2, 3]
    assert registry.scale(-3) == "" and registry.scale(1) == ""
    assert registry.state().workers == [0, 4], "a number is not given twice: it names a log"
    assert registry.check_in(1, "a", "node", None).leaves and not registry.check_in(4, "a", "node", None).leaves
    assert registry.scale(-2) == "the run has 2 workers, and worker 0 stays"


def test_no_more_workers_are_added_than_a_server_takes() -> None:
    """One more would be refused by it, and end the run."""
    registry = Registry("secret", 2)
    assert registry.scale(17) == "at most 16 workers can be added to a run, and 0 were added"
    assert registry.scale(16) == "" and registry.scale(1).endswith("and 16 were added")
    assert registry.scale(-1) == "" and registry.scale(1) == ""


def test_a_worker_of_the_beginning_that_was_taken_leaves_no_room_for_one_more() -> None:
    """The server keeps its place for it."""
    registry = Registry("secret", 3)
    assert registry.scale(-2) == "" and registry.scale(17).startswith("at most 16 workers")
    assert registry.scale(16) == "" and registry.state().workers == [0, *range(3, 19)]


def test_a_worker_learns_from_the_registry_where_the_server_is() -> None:
    registry, request = Registry("secret", 2), ServerRequest("a.server", "/run")
    assert registry.check_in(1, "b", "second", None).address == ""
    assert registry.check_in(0, "a", "first", request).run_dir == "/run"
    assert registry.state().request == request and registry.state().node == "first"
    assert [registry.begin_server(), registry.begin_server()] == [False, True], "the second goes on from a snapshot"
    registry.record_server(NodeAddress("a", 7))
    assert registry.check_in(1, "b", "second", None).address == "a:7"
    again = registry.check_in(0, "c", "third", ServerRequest("a.server", "/other"))
    assert again.run_dir == "/run" and registry.state().node == "first", "where the server is"
    assert not again.leaves
    for place in (NodeAddress("b", 8), NodeAddress("c", 9)):  # a shard's actor may be started again elsewhere
        registry.record_shard(1, place)
        assert registry.place_of_shard(1) == place and registry.place_of_shard(0) is None
    registry.end()
    assert all(registry.check_in(worker, "a", "first", None).leaves for worker in (0, 1))


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["fairseq-async", "ray", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    return error


def test_mistakes_are_one_line_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without Ray, whether it is installed or not."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fairseq_async.launch.ray.run", raising=False)  # another test may have imported it
    job = ["--", "python", "train.py"]
    assert 'pip install ".[ray]"' in said(monkeypatch, capsys, "--workers", "2*CPU", *job)
    assert 'pip install ".[ray]"' in said(monkeypatch, capsys, "scale", "+2")
    assert '--workers "4*TPU"' in said(monkeypatch, capsys, "--workers", "4*TPU", *job)
    assert "COMMAND" in said(monkeypatch, capsys, "--workers", "2*CPU", "--")
    assert "server_shards=2" in said(monkeypatch, capsys, "--workers", "2*CPU", "--shards", "2", *job)
    twice = ["--", "fairseq-train", "data", "--server-shards=a:1"]
    assert "give one of them" in said(monkeypatch, capsys, "--workers", "2*CPU", "--shards", "2", *twice)
    assert "scale two: how many workers more or fewer" in said(monkeypatch, capsys, "scale", "two")
    assert "--name is empty" in said(monkeypatch, capsys, "--name", "", "scale", "+2")
    assert "options stand before scale" in said(monkeypatch, capsys, "scale", "+2", "--name", "second")
