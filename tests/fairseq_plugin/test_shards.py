"""``--shards``: parts of the training set that the server assigns by need."""

import json
import os
import shutil
import signal
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq.data.iterators import EpochBatchIterator
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.compat.shards import DataShard, ShardedBatches
from fairseq_async.fairseq_plugin.refused import check_shards
from fairseq_async.fairseq_plugin.replayed import FairseqRun
from fairseq_async.fairseq_plugin.shards import ShardedEpochs, sharded_batches
from fairseq_async.replay.replay import Recording, Replay
from tests.helpers.commands import MODEL, PACKAGE, Processes, command, train_alone
from tests.helpers.launched import count, find, worker_of
from tests.helpers.run_files import events, load, relative_differences
from tests.helpers.stand_ins import Position
from tests.helpers.waiting import wait_until

Alone = Callable[..., dict[str, tuple[int, str]]]
LOCAL = ["--optimizer", "local_sgd", "--user-dir", PACKAGE]
ADAM = ["--inner-optimizer", "adam", "--adam-betas", "(0.9, 0.98)"]
NO_FILES = ["--disable-validation", "--no-epoch-checkpoints"]


class Numbers(Dataset[int]):
    """Samples that are numbers."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __getitem__(self, index: int) -> int:
        return self.first + index


class NumbersOfEpochs(Numbers):
    """Samples that are others in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.first = 100 * epoch


def iterator(
    batches: int, shards: int = 1, shard: int = 0, first: int = 0, kind: type[Numbers] = Numbers
) -> EpochBatchIterator:
    """fairseq's own, over batches of one sample."""
    numbers = [[number] for number in range(batches)]
    return EpochBatchIterator(kind(first), list, numbers, 3, shards, shard, reuse_dataloader=True)


def batches(total: int, shards: int, kind: type[Numbers] = Numbers) -> ShardedBatches:
    whole = iterator(total, kind=kind)
    return ShardedBatches([DataShard(whole, number, shards) for number in range(shards)], fixed=False)


@given(st.data())
def test_a_batch_of_a_shard_is_that_of_fairseqs_rank_in_whatever_order_they_are_drawn(choices: st.DataObject) -> None:
    total, shards = choices.draw(st.integers(4, 9)), choices.draw(st.integers(1, 4))
    ranks = [iterator(total, shards, shard, kind=NumbersOfEpochs) for shard in range(shards)]
    expected = [[batch for _ in range(3) for batch in rank.next_epoch_itr()] for rank in ranks]
    drawn = batches(total, shards, NumbersOfEpochs)
    each = st.tuples(st.integers(0, shards - 1), st.integers(0, len(expected[0]) - 1))
    for shard, number in choices.draw(st.lists(each, max_size=12)):
        for follows in range(number, min(number + 2, len(expected[0]))):
            assert drawn.draw(shard, follows) == expected[shard][follows]


def test_a_pass_over_all_shards_has_every_batch_once_and_the_next_pass_is_in_another_order() -> None:
    drawn = batches(10, 3)  # of 4, 3 and 3, and an empty one that fills each of the last two up
    assert drawn.sizes == [4, 4, 4] and drawn.total == 10
    passes = [[drawn.draw(shard, 4 * each + number) for shard in range(3) for number in range(4)] for each in (0, 1)]
    for each in passes:
        assert sorted(sample for batch in each for sample in batch) == list(range(10))
    assert passes[0] != passes[1]


def epochs(position: Position) -> ShardedEpochs:
    """Of twelve batches in three shards, two workers, and steps of two batches: three steps an epoch."""
    return ShardedEpochs(batches(12, 3), position, workers=2, update_freq=2)


def test_an_epoch_is_a_workers_part_of_a_pass_and_draws_where_the_server_says() -> None:
    position, expected = Position(), batches(12, 3)
    given_epochs = epochs(position)
    drawn, wanted = list[Any](), list[Any]()
    for step, (shard, offset) in enumerate([(0, 0), (2, 1), (1, 0), (1, 5)]):
        if step in (0, 3):
            assert given_epochs.next_epoch_idx == 1 + step // 3
            loop = given_epochs.next_epoch_itr()
            assert len(loop) == 6 and not given_epochs.end_of_epoch()
        position.sequence, position.shard, position.offset = step, shard, offset
        drawn += [next(loop), next(loop)]
        wanted += [expected.draw(shard, 2 * offset), expected.draw(shard, 2 * offset + 1)]
    assert drawn == wanted and given_epochs.iterations_in_epoch == 2


@pytest.mark.parametrize(("total", "length"), [(12, 6), (13, 8), (9, 6)])
def test_an_epoch_has_whole_steps(total: int, length: int) -> None:
    assert len(ShardedEpochs(batches(total, 3), Position(), workers=2, update_freq=2)) == length


def test_the_steps_of_a_round_follow_each_other_in_the_shard() -> None:
    position, expected = Position(shard=1, offset=3), batches(12, 3)
    loop = epochs(position).next_epoch_itr()
    for position.done in range(3):
        assert [next(loop), next(loop)] == [expected.draw(1, 6 + 2 * position.done + micro) for micro in (0, 1)]


def test_epochs_go_on_where_they_were_also_with_other_workers() -> None:
    before, after = epochs(Position()), epochs(Position())
    loop = before.next_epoch_itr()
    next(loop), next(loop)
    assert before.next_epoch_idx == 1
    after.load_state_dict(before.state_dict())
    assert after.next_epoch_idx == 1 and after.iterations_in_epoch == 2
    assert len(list(after.next_epoch_itr())) == 4
    assert after.state_dict()["epoch"] == after.next_epoch_idx == 2 and after.state_dict()["iterations_in_epoch"] == 0
    for drawn in (6, 9):  # an epoch was longer, or as long but not yet ended: there were fewer workers
        after.load_state_dict({"epoch": 3, "iterations_in_epoch": drawn})
        assert after.next_epoch_idx == 4 and len(list(after.next_epoch_itr())) == 6


def of_task(iterators: list[EpochBatchIterator], data: str, shards: int, cached: bool = True) -> ShardedBatches:
    """The shards of a task whose epochs have these iterators."""
    task = Namespace(dataset_to_epoch_iter={}, dataset=lambda subset: subset)
    cfg = Namespace(
        task=Namespace(data=data),
        dataset=Namespace(train_subset="train"),
        distributed_training=Namespace(fix_batches_to_gpus=False),
    )

    def make(epoch: int) -> EpochBatchIterator:
        made = iterators[(epoch - 1) % len(iterators)]
        task.dataset_to_epoch_iter = {"train": made if cached else iterator(9)}
        return made

    return sharded_batches(make, task, cfg, shards)


def test_each_directory_of_several_is_a_shard_of_its_own_size() -> None:
    both = [iterator(5), iterator(3, first=100)]
    shards = of_task(both, "news:law", 2)
    assert shards.sizes == [5, 3] and shards.total == 8
    law = [shards.draw(1, number)[0] for number in range(6)]  # in turns with the others
    news = [shards.draw(0, number)[0] for number in range(5)]
    assert sorted(law) == [100, 100, 101, 101, 102, 102] and sorted(news) == [0, 1, 2, 3, 4]


def test_a_shard_without_a_batch_and_batches_that_change_are_mistakes() -> None:
    with pytest.raises(ConfigurationError, match="the training set has 3 batches, too few for 4 shards"):
        of_task([iterator(3)], "data", 4)
    with pytest.raises(ConfigurationError, match="--shards: this task makes other batches in each epoch"):
        of_task([iterator(9)], "data", 2, cached=False)


@pytest.mark.parametrize(("shards", "directories", "goes"), [(2, 1, True), (2, 2, True), (2, 3, False), (3, 2, False)])
def test_there_are_as_many_shards_as_directories_of_data_where_there_are_several(
    shards: int, directories: int, goes: bool
) -> None:
    task, dataset = SimpleNamespace(data=os.pathsep.join(["data"] * directories)), SimpleNamespace(curriculum=0)
    others = {"optimization": SimpleNamespace(update_freq=[1]), "checkpoint": SimpleNamespace(reset_dataloader=False)}
    cfg: Any = SimpleNamespace(task=task, dataset=dataset, **others)
    with nullcontext() if goes else pytest.raises(ConfigurationError, match=f"give --shards {directories}"):
        check_shards(shards, cfg)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reset-dataloader"], "--reset-dataloader: with --shards the server knows how far the data is used"),
        (["--update-freq", "4,2"], "--update-freq 4,2: with --shards all steps are alike; give one number"),
        (["--curriculum", 1], "--curriculum: not possible with --shards"),
        (["--shards", -1], "--shards: Input should be greater than or equal to 0"),
    ],
)
def test_what_does_not_go_with_shards_is_one_line(
    refused: Callable[..., str], flags: list[object], message: str
) -> None:
    assert message in refused(*LOCAL, "--distributed-world-size", 1, "--max-update", 10, "--shards", 2, *flags)


def two_sources(data: Path, folder: Path) -> str:
    """The training set, and beside it the small validation set as one of its own: ``DATA:DATA``."""
    for path in data.iterdir():
        name = path.name.replace("valid", "train") if path.name.startswith("valid") else path.name
        if not path.name.startswith("train"):
            shutil.copyfile(path, folder / name)
    return f"{data}:{folder}"


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one worker, one after the other in one process."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "small").mkdir()
    common = [*LOCAL, *ADAM, "--local-steps", 5, "--dropout", 0.1, "--log-interval", 1, *NO_FILES]
    halves = [*common, "--shards", 2, "--warmup-updates", 50]
    parts = [*halves, "--save-dir", folder / "parts"]
    jobs = {
        "without": [*common, "--max-update", 60],
        "one": [*common, "--shards", 1, "--max-update", 60],
        "whole": [*halves, "--max-update", 60],
        "first": [*parts, "--max-update", 40],
        "second": [*parts, "--max-update", 60],
        "accumulated": [*halves, "--max-update", 10, "--update-freq", 2, "--record"],
        "sources": [*halves, "--max-update", 30],
    }
    with Processes() as processes:
        train_alone(processes, data, folder, jobs, 280, {"sources": two_sources(data, folder / "small")})
    return folder


def log(runs: Path, name: str) -> str:
    """Of a job that has come to its end."""
    text = (runs / f"{name}-0.log").read_text()
    assert text.endswith("exit code 0\n"), text[-2000:]
    return text


def differences(runs: Path, left: str, right: str) -> set[float]:
    assert log(runs, left)
    return set(relative_differences(runs / left / "checkpoint_last.pt", runs / right / "checkpoint_last.pt").values())


def test_one_shard_and_one_worker_is_the_run_without_shards_to_the_bit(runs: Path) -> None:
    """60 steps with dropout, Adam and a schedule: more than two passes over the 25 batches."""
    assert log(runs, "one") and differences(runs, "without", "one") == {0.0}
    counts = [load(runs / name / "checkpoint_last.pt")["optimizer_history"][-1] for name in ("without", "one")]
    assert counts[0]["num_updates"] == counts[1]["num_updates"] == 60
    left = [[event["loss"] for event in events(runs / name)] for name in ("without", "one")]
    assert left[0] == left[1] and len(left[0]) == 12


def test_shards_are_drawn_by_need_each_with_its_own_schedule(runs: Path) -> None:
    left = events(runs / "whole")
    drawn = Counter[int]()
    for event in left:
        assert event["offset"] == drawn[event["shard"]]  # no batch twice, and none left out
        assert event["progress"] == 2 * drawn[event["shard"]] and event["progress_per_step"] == 2
        drawn[event["shard"]] += event["local_steps"]
    assert drawn == {0: 30, 1: 30}
    lines = [json.loads(line) for line in log(runs, "whole").splitlines() if line.startswith('{"epoch"')]
    rates = {int(line["num_updates"]): float(line["lr"]) for line in lines if "num_updates" in line and "lr" in line}
    first, second = left[0]["shard"], left[1]["shard"]
    assert first != second  # the other one was behind, and at the beginning of its schedule
    for step in range(1, 5):
        assert rates[5 + step] == rates[step] == pytest.approx(2e-3 * 2 * step / 50, rel=0.01)


def test_a_resumed_run_goes_on_in_each_shard_where_it_was(runs: Path) -> None:
    assert log(runs, "first") and log(runs, "second") and differences(runs, "whole", "parts") == {0.0}
    keys = ("shard", "offset", "progress")
    whole, parts = ([[event[key] for key in keys] for event in events(runs / name)] for name in ("whole", "parts"))
    assert parts == whole
    plan = load(runs / "parts" / "checkpoint_last.pt")["extra_state"]["async_server"]["plan"]
    assert plan["used"] == [30, 30] and plan["steps"] == 60


def test_directories_are_shards_of_their_sizes(runs: Path) -> None:
    assert log(runs, "sources")
    sizes = json.loads((runs / "sources" / "run.json").read_text())["method"]["shards"]
    assert sizes[0] == 25 and 1 <= sizes[1] <= 3
    drawn = Counter[int]()
    for event in events(runs / "sources"):
        drawn[event["shard"]] += event["local_steps"]
    assert drawn.total() == 30 and drawn[0] >= 20


def test_a_replay_draws_from_the_shards_that_the_run_drew_from(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two batches, each in its shard."""
    assert log(runs, "accumulated")
    monkeypatch.chdir(Path.cwd())  # a replay changes to the directory of the run
    recording = Recording.read(runs / "accumulated")
    replay = Replay(recording, FairseqRun(recording.run_dir, recording.spec, recording.events))
    assert list(replay.steps()) == [1, 2] and {event.shard for event in recording.events} == {0, 1}


def launched(
    processes: Processes, data: Path, save_dir: Path, *flags: object, launcher: Sequence[object] = ()
) -> Popen[str]:
    ours = [command("fairseq-async"), "launch", "--workers", 2, *launcher, "--", "fairseq-train", data, *MODEL]
    return processes.start([*ours, "--optimizer", "local_sgd", *NO_FILES, "--save-dir", save_dir, *flags])


def test_two_workers_in_step_on_two_shards_are_the_run_without_shards_to_the_bit(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    """Whichever of the two draws a shard: SGD keeps nothing of it, and a sum of two is the same both ways round."""
    flags = ["--inner-optimizer", "sgd", "--lr", "0.5", "--lr-scheduler", "fixed", "--dropout", 0]
    flags += ["--warmup-updates", 0, "--outer", "diloco", "--local-steps", 4, "--max-update", 32]
    jobs = {"without": [], "with": ["--shards", 2]}
    for name, shards in jobs.items():
        launcher = launched(processes, data, tmp_path / name, *flags, *shards)
        output, _ = launcher.communicate(timeout=120)
        assert launcher.returncode == 0, output
    assert {event["shard"] for event in events(tmp_path / "with")} == {0, 1}
    ends = [tmp_path / name / "checkpoint_last.pt" for name in jobs]
    assert set(relative_differences(*ends).values()) == {0.0}


def test_shards_survive_the_death_of_a_worker_and_of_the_server(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    """Three shards and two workers: who is left draws from all, and none is drawn less because somebody died."""
    flags = [
        *ADAM,
        "--outer",
        "sgd",
        "--shards",
        3,
        "--local-steps",
        4,
        "--max-update",
        48,
        "--snapshot-seconds",
        0.001,
    ]
    launcher = launched(processes, data, tmp_path, *flags, launcher=("--slowdown", "8,8"))
    wait_until(lambda: min(count(tmp_path, 0), count(tmp_path, 1)) >= 2, 120)
    os.kill(worker_of(tmp_path, 1), signal.SIGKILL)
    here = count(tmp_path, 0)
    wait_until(lambda: count(tmp_path, 0) >= here + 3, 60)
    (server,) = find(tmp_path, "local_sgd_main")
    os.kill(server, signal.SIGKILL)
    output, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 0 and "the server was killed by SIGKILL" in output, output
    plan = load(tmp_path / "checkpoint_last.pt")["extra_state"]["async_server"]["plan"]
    assert sum(plan["used"]) == plan["steps"] >= 96
    assert max(plan["used"]) - min(plan["used"]) <= 16  # at most two rounds each way
    assert {event["shard"] for event in events(tmp_path) if event["worker"] == 0} == {0, 1, 2}
