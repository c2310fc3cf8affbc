"""Real ``fairseq-train`` processes: equal to what is known, then learning, stopping, going on."""

import sys
from collections.abc import Callable
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.data.iterators import GroupedIterator
from fairseq.trainer import Trainer
from fairseq_cli import train
from torch import Tensor

from fairseq_async.fairseq_plugin.compat.dealt import DEALT
from fairseq_async.fairseq_plugin.replayed import FairseqRun
from fairseq_async.replay import Recording, Replay
from tests.helpers.commands import HYBRID, MODEL, PACKAGE, Processes, command, synchronous
from tests.helpers.run_files import events, load, relative_differences, valid_losses

Launch = Callable[..., tuple[int, str]]
Alone = Callable[..., dict[str, tuple[int, str]]]
OURS = ["--user-dir", PACKAGE, *HYBRID]


def test_one_worker_and_one_update_per_step_is_plain_adam_bit_for_bit(alone: Alone, tmp_path: Path) -> None:
    """Also: a worker alone starts its own server, as fairseq-train is run without any launcher. A layer that is dropped
    has no gradient, and does not decay."""
    adam = ["--adam-betas", "(0.9, 0.98)", "--weight-decay", "0.01", "--max-update", 30, "--encoder-layerdrop", 0.6]
    ended = alone(plain=["--optimizer", "adam", *adam], ours=[*OURS, "--updates-per-step", 1, *adam])
    assert [code for code, _ in ended.values()] == [0, 0], ended
    differences = relative_differences(tmp_path / "plain/checkpoint_last.pt", tmp_path / "ours/checkpoint_last.pt")
    assert set(differences.values()) == {0.0}
    assert len(events(tmp_path / "ours")) == 30


def test_the_barrier_is_fairseqs_synchronous_run(
    launch: Launch, processes: Processes, data: Path, tmp_path: Path
) -> None:
    """12 updates reach into the second epoch, whose end has a batch for some workers only."""
    flags = ["--momentum", "0.9", "--max-update", 12, "--lr", "0.5"]
    synchronous(processes, data, tmp_path / "sync", 3, "--optimizer", "sgd", *flags)
    code, output = launch(3, tmp_path / "ours", "--inner-optimizer", "sgd", "--barrier", *flags)
    assert code == 0, output
    differences = relative_differences(tmp_path / "sync/checkpoint_last.pt", tmp_path / "ours/checkpoint_last.pt")
    assert len(differences) > 30
    assert max(differences.values()) < 1e-6


@pytest.mark.usefixtures("executed")
def test_two_asynchronous_workers_learn_and_leave_what_was_promised(
    launch: Launch, processes: Processes, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorboard = tmp_path / "tensorboard"
    code, output = launch(
        2, tmp_path, "--max-update", 150, "--save-interval-updates", 25, "--tensorboard-logdir", tensorboard
    )
    assert code == 0, output
    log = tmp_path / "logs/worker-0.log"
    losses = valid_losses(log)
    assert losses[-1] < losses[0] - 0.5, losses
    updates = events(tmp_path)
    applied = [event for event in updates if event["status"] == "applied"]
    assert {event["worker"] for event in applied} == {0, 1}
    assert len(applied) in (300, 301)  # two gradients are a step, and the last may begin in the middle of one
    assert applied[-1]["version_after"] >= 150  # a step that closes with one of them is half a step
    for worker in (0, 1):
        sequences = [event["sequence"] for event in applied if event["worker"] == worker]
        assert sequences == list(range(len(sequences)))
    assert all(e["staleness"] >= 0 and e["weight"] > 0 and e["norm"] > 0 for e in applied)
    orders = [[e["weight"] for e in applied if e["worker"] == worker][:10] for worker in (0, 1)]
    assert orders[0] != orders[1], "each worker draws in its own order"
    saved = sorted(int(path.stem.rsplit("_", 1)[1]) for path in tmp_path.glob("checkpoint_*_*.pt"))
    assert len(saved) > 2 and all(number % 25 == 0 for number in saved)  # at the end of an epoch: checkpointE.pt
    for quantity in ("staleness", "push_ms", "pull_ms"):
        assert f'"{quantity}"' in log.read_text()
    assert list(tensorboard.glob("train_inner/events*")) and list(tensorboard.glob("worker1/train_inner/events*"))
    assert not [line for line in (tmp_path / "logs/worker-1.log").open() if " | valid | " in line]
    monkeypatch.undo()  # what generates is no program of ours
    check_generation(processes, data, tmp_path)


def check_generation(processes: Processes, data: Path, run_dir: Path) -> None:
    """Plain: without --user-dir, and with torch's check of what it loads."""
    code, output = processes.run(
        [command("fairseq-generate"), data, "--path", run_dir / "checkpoint_last.pt", "--beam", 2, "--max-tokens", 500]
    )
    assert code == 0 and "Translated 40 sentences" in output, output[-2000:]


def test_torchrun_starts_it_without_our_launcher(processes: Processes, data: Path, tmp_path: Path) -> None:
    """On one machine; ``tests/launch/test_two_machines.py`` has two."""
    torchrun = [command("torchrun"), "--standalone", "--nproc-per-node", 2, command("fairseq-train"), data, *MODEL]
    ours = ["--user-dir", PACKAGE, "--distributed-world-size", 1, *HYBRID, "--barrier"]  # a late one is waited for
    ours += ["--max-update", 40, "--save-dir", tmp_path / "run"]
    code, output = processes.run([*torchrun, *ours], MASTER_PORT="0")
    assert code == 0, output[-3000:]
    applied = events(tmp_path / "run")
    assert {event["worker"] for event in applied} == {0, 1} and applied[-1]["version_after"] == 40


_PREFETCHING = """
from fairseq.data.iterators import BufferedIterator
import torch
import fairseq_async
class Endless:
    def __len__(self): return 10**9
    def __iter__(self):
        while True:
            torch.stack([torch.arange(3)] * 100)
            yield 0
batches = BufferedIterator({size}, Endless())
for _ in range({taken}): next(batches)
"""


@pytest.mark.parametrize(("size", "taken"), [(10, 3), (10**6, 1)], ids=["waiting", "busy"])
def test_a_batch_that_is_being_prepared_at_the_end_does_not_abort_the_process(
    processes: Processes, size: int, taken: int
) -> None:
    """Without it "busy" ends by SIGABRT: the thread is inside torch when the interpreter is taken from under it."""
    code, output = processes.run([sys.executable, "-c", _PREFETCHING.format(size=size, taken=taken)])
    assert code == 0, output


def test_restoring_takes_up_a_half_filled_accumulator(alone: Alone, tmp_path: Path) -> None:
    flags, epoch_end = [*OURS, "--updates-per-step", 3, "--max-update", 14], tmp_path / "straight/checkpoint1.pt"
    ended = alone(straight=flags, restored=[*flags, "--restore-file", epoch_end])
    assert [code for code, _ in ended.values()] == [0, 0], ended
    assert load(epoch_end)["last_optimizer_state"]["server"]["rule"]["count"] > 0
    ends = [tmp_path / name / "checkpoint_last.pt" for name in ("straight", "restored")]
    assert set(relative_differences(*ends).values()) == {0.0}


def test_local_accumulation_pushes_once_for_several_batches(launch: Launch, tmp_path: Path) -> None:
    code, output = launch(1, tmp_path, "--update-freq", 3, "--updates-per-step", 2, "--max-update", 8)
    assert code == 0, output
    weights = [event["weight"] for event in events(tmp_path)]
    assert len(weights) == 16 and sum(weights) / len(weights) > 400  # batches have at most 200 tokens


def test_a_batch_that_fills_up_an_epoch_takes_none_from_those_accumulated_with_it(
    launch: Launch, data: Path, tmp_path: Path
) -> None:
    """Of 25 batches worker 1 has 12, and a dummy for its thirteenth."""
    code, output = launch(2, tmp_path, "--update-freq", 5, "--barrier", "--max-epoch", 2)
    assert code == 0, output
    sentences = (data.parent / "train.b").read_text().splitlines()
    tokens = sum(len(sentence.split()) + 1 for sentence in sentences)
    assert sum(event["weight"] for event in events(tmp_path)) == pytest.approx(2 * tokens)
    assert len(events(tmp_path)) == 2 * 2 * 3


def test_a_worker_without_a_batch_is_a_mistake_in_one_line(launch: Launch, tmp_path: Path) -> None:
    code, output = launch(2, tmp_path, "--max-tokens", 100_000, "--max-update", 4)
    assert code != 0 and "the training set has 1 batches for 2 workers" in output and "Traceback" not in output


def test_max_epoch_counts_the_passes_of_all_workers_together(launch: Launch, tmp_path: Path) -> None:
    code, output = launch(2, tmp_path, "--max-epoch", 8, "--updates-per-step", 1, launcher=["--slowdown", "1,3"])
    assert code == 0, output
    applied = [event for event in events(tmp_path) if event["status"] == "applied"]
    assert abs(len(applied) - 8 * 25) <= 2  # 25 batches a pass, in each worker's own order
    counts = [sum(event["worker"] == worker for event in applied) for worker in (0, 1)]
    assert counts[0] > counts[1] > 0


def test_half_precision_models_have_fp32_masters_in_the_server(alone: Alone, tmp_path: Path) -> None:
    precisions = {"bf16": [], "fp16": ["--fp16-init-scale", "4"], "memory_efficient_fp16": []}
    jobs = {name: [*OURS, f"--{name.replace('_', '-')}", *more] for name, more in precisions.items()}
    for name, (code, output) in alone(**{name: [*flags, "--max-update", 40] for name, flags in jobs.items()}).items():
        assert code == 0, output
        losses = [event["loss"] for event in events(tmp_path / name)]
        assert sum(losses[-10:]) < sum(losses[:10]) - 1.4, name
        state = load(tmp_path / name / "checkpoint_last.pt")
        masters = state["last_optimizer_state"]["server"]["parameters"]
        assert masters.dtype == torch.float32 and not torch.equal(masters, masters.half().float())


def synchronous_order(run: FairseqRun, workers: int, micro_batches: int) -> list[Any]:
    """The batches of a synchronous run's first steps, in the order of its ranks; an empty one where a rank has none."""
    order = []
    parts = [Trainer.get_train_iterator(run.workers[each].trainer, 1) for each in range(workers)]
    for each, part in enumerate(parts):
        part.num_shards, part.shard_id = workers, each
    for _ in range(4):
        passes = [GroupedIterator(part.next_epoch_itr(), micro_batches) for part in parts]
        for step in zip(*passes, strict=True):
            order += [batch for group in step for batch in [*group, *[{}] * (micro_batches - len(group))]]
    return order


def in_float64(run_dir: Path, recording: Recording) -> Tensor:
    """Where SGD in float64 ends with the mean per token over the batches of each step."""
    run = FairseqRun(run_dir, recording.spec, recording.events)
    trainer = run.workers[0].trainer
    named, criterion = trainer.trainable_parameters(), trainer.criterion.train()
    model, parameters = trainer.model.double().train(), [parameter for _, parameter in named]
    torch.nn.utils.vector_to_parameters(recording.start["server"]["parameters"].double(), parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    order = iter(synchronous_order(run, 2, 4))
    for step in recording.rounds():
        tokens = 0
        optimizer.zero_grad()
        assert sum(event.micro_batches or 0 for event in step) == 8
        for batch in filter(len, islice(order, 8)):
            loss, size, _ = criterion(model, batch)
            loss.backward()
            tokens += size
        assert tokens == sum(event.weight for event in step)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= tokens
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(parameters)


def test_shares_by_speed_are_a_synchronous_run_of_the_same_batches(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three passes over the data, of whose last steps the workers have fewer batches."""
    monkeypatch.chdir(tmp_path)
    flags = ["--barrier", "--shares", "auto", "--micro-batches", 2, "--update-freq", 2, "--max-tokens", 100]  # 4 of 50
    flags += ["--max-epoch", 3, "--record"]
    flags += ["--inner-optimizer", "sgd", "--dropout", 0, "--clip-norm", 0]
    flags += ["--lr", 0.5, "--lr-scheduler", "fixed", "--warmup-updates", 0]
    launcher = ["--slowdown", "1,9"]
    code, output = launch(2, tmp_path / "run", *flags, launcher=launcher)
    assert code == 0, output
    given = {(event["worker"], event["micro_batches"]) for event in events(tmp_path / "run")}
    assert given > {(0, 4), (1, 4)}
    assert all(event["weight"] <= 50 * event["micro_batches"] for event in events(tmp_path / "run"))
    assert sum(event["epochs"] for event in events(tmp_path / "run")) >= 3 - 1e-6
    recording = Recording.read(tmp_path / "run")
    repeated = Replay(recording, FairseqRun(tmp_path / "run", recording.spec, recording.events))
    versions = list(repeated.steps())
    assert len(versions) == repeated.compared == events(tmp_path / "run")[-1]["version_after"]
    torch.testing.assert_close(repeated.parameters.double(), in_float64(tmp_path / "run", recording), rtol=0, atol=1e-6)


def test_shares_by_speed_go_on_with_the_batches_that_follow(launch: Launch, tmp_path: Path) -> None:
    """The first part stops in the midst of a pass."""
    flags = ["--barrier", "--shares", "auto", "--update-freq", 4, "--max-tokens", 50]
    for end in (["--max-update", 4], ["--max-epoch", 2]):
        code, output = launch(2, tmp_path, *flags, *end, launcher=["--slowdown", "1,9"])
        assert code == 0, output
    work = sorted((event["offset"], event["micro_batches"]) for event in events(tmp_path))
    assert [first for first, _ in work] == [0, *accumulate(number for _, number in work)][:-1]
    assert {number for _, number in work} > {4}
    of_a_pass = sum(work[-1]) // 2
    assert of_a_pass % 8 == 0 and of_a_pass > 5 * 8
    for event in events(tmp_path):
        assert event["position"]["epoch"] == 1 + event["offset"] // of_a_pass
    assert sum(event["epochs"] for event in events(tmp_path)) == pytest.approx(2)
    assert (tmp_path / "checkpoint1.pt").exists() and (tmp_path / "checkpoint2.pt").exists()


def test_before_speeds_are_known_shares_change_no_bit(launch: Launch, tmp_path: Path) -> None:
    """Of 25 batches worker 0 has 13 and worker 1 has 12: the third step, at the end of the pass, is shorter."""
    for shares in ("auto", "equal"):
        flags = ["--barrier", "--shares", shares, "--update-freq", 5, "--max-epoch", 1]
        code, output = launch(2, tmp_path / shares, *flags)
        assert code == 0 and len(events(tmp_path / shares)) == 6, output
        assert "validation at update 3" in output
    differences = relative_differences(tmp_path / "auto/checkpoint1.pt", tmp_path / "equal/checkpoint1.pt")
    assert set(differences.values()) == {0.0}


def test_a_script_that_groups_batches_itself_draws_from_each_workers_part(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    """Its groups are counted before the server deals."""
    script, usual = tmp_path / "fairseq_own.py", "from fairseq.data import data_utils, iterators"
    text = Path(train.__file__).read_text()
    assert usual in text
    own = "from fairseq.data import data_utils\nfrom fairseq.data.iterators import GroupedIterator"
    script.write_text(text.replace(usual, own).replace("iterators.GroupedIterator", "GroupedIterator"))
    flags = ["--user-dir", PACKAGE, *HYBRID, "--shares", "auto", "--update-freq", 4, "--max-epoch", 2]
    start = [command("torchrun"), "--standalone", "--nproc-per-node", 2, script, data]
    code, output = processes.run([*start, *MODEL, *flags, "--save-dir", tmp_path / "run"])
    assert code == 0, output
    assert sum(event["epochs"] for event in events(tmp_path / "run")) >= 2 - 1e-9
    assert not [event for event in events(tmp_path / "run") if DEALT in event["position"]]


def test_shares_go_on_with_the_parts_of_a_run_without_them_unless_the_data_is_reset(
    launch: Launch, tmp_path: Path
) -> None:
    """Each worker has 12 or 13 batches, and two in a step, or as many as their speeds on a busy machine say."""
    equal, auto = ["--shares", "equal"], ["--shares", "auto"]
    parts = [equal, 3], [auto, 5], [[*auto, "--reset-dataloader"], 7]
    last = []
    for flags, updates in parts:
        code, output = launch(2, tmp_path, "--barrier", "--update-freq", 2, *flags, "--max-update", updates)
        assert code == 0, output
        last.append(events(tmp_path)[-2:])
    before, own_part, anew = last
    assert {event["position"]["iterations_in_epoch"] for event in before} == {3 * 2}
    assert sum(event["position"]["iterations_in_epoch"] for event in own_part) == 2 * 5 * 2
    assert not [event for event in (*before, *own_part) if DEALT in event["position"]]
    assert all(event["position"][DEALT] for event in anew)
    assert min(event["offset"] for event in anew) == 4 and sum(event["micro_batches"] for event in anew) == 4
