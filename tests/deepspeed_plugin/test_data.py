"""The loader of a worker's batches, and the digest of its first one."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fairseq_async.deepspeed_plugin.arguments import Arguments
from fairseq_async.deepspeed_plugin.data import DataShare, ShardedLoader, length_of, sizes_of_shards
from fairseq_async.deepspeed_plugin.engines.engine import AsyncEngine
from fairseq_async.deepspeed_plugin.engines.synchronous import GroupPosition
from fairseq_async.deepspeed_plugin.loading import Loading, loading_of
from fairseq_async.errors import ConfigurationError
from fairseq_async.server.rounds.dealer import Dealer
from fairseq_async.worker.batches import BatchDigest
from fairseq_async.worker.shards import BatchCounter, ShardOrder, shard_sizes
from tests.helpers.stand_ins import Numbers, Position


def steps(position: Position) -> bool:
    """Moves on by a step."""
    position.done += 1
    return True


def loader(
    position: Position,
    endless: bool,
    micro_batches: int = 1,
    loading: Loading | None = None,
    size: int = 2,
    rank: int = 0,
    ranks: int = 1,
) -> ShardedLoader:
    """Twelve samples in batches of two; the worker's shard is its part of them."""
    share = DataShare([6, 6], 2, size, micro_batches, rank, ranks)
    return ShardedLoader(Numbers(12), share, 1, None, lambda: position, endless, loading or Loading(), lambda: 0)  # type: ignore[arg-type]


def test_without_an_end_of_the_run_a_loop_is_one_pass_over_the_workers_part() -> None:
    """``for epoch in range(2): for batch in loader``: each sample of the worker's half once in an epoch."""
    position = Position()
    batches = loader(position, endless=False)
    assert len(batches) == 3
    for _ in range(2):
        drawn: list[int] = []
        for batch in batches:
            drawn += batch.tolist()  # type: ignore[attr-defined]
            position.done += 1
        assert sorted(drawn) == [0, 1, 2, 3, 4, 5]


def loops_of(worker: int, average: int, given: Sequence[int], dealt: bool) -> list[list[list[int]]]:
    """The batches of three loops of worker 0 or 1, whose steps after the first are of ``given`` micro-batches each."""
    position = Position(shard=worker)
    sizes = shard_sizes(20, 2)
    share = DataShare(sizes, 2, 2, average, rank=0, ranks=1)
    made = ShardedLoader(Numbers(20), share, 1, None, lambda: position, False, Loading(), lambda: 99)  # type: ignore[arg-type]
    dealer = Dealer(2, average)

    def begin() -> int:
        now = given if position.sequence else [average] * 2
        if dealt:
            numbers = [dealer.deal(each, position.sequence, now[each])[0] for each in (0, 1)]
            position.first_micro_batch, position.micro_batches = numbers[worker], now[worker]
        return now[worker]

    left = begin()
    loops: list[list[list[int]]] = []
    for _ in range(3):
        loops.append([])
        for batch in made:
            loops[-1].append(batch.tolist())  # type: ignore[attr-defined]
            left -= 1
            if left == 0:
                position.sequence = position.offset = position.sequence + 1
                left = begin()
    return loops


@pytest.mark.parametrize("average", [2, 3, 4, 5])
def test_equal_workers_are_dealt_what_they_would_draw_by_themselves(average: int) -> None:
    """Also where a pass, of five batches, is no number of whole steps."""
    for worker in (0, 1):
        assert loops_of(worker, average, [average] * 2, True) == loops_of(worker, average, [average] * 2, False)


def test_the_loops_of_all_workers_together_are_a_pass_each_whoever_is_fast() -> None:
    """Here a pass of ten batches is one step."""
    fast, slow = (loops_of(worker, 5, [9, 1], True) for worker in (0, 1))
    assert [len(loop) for loop in fast] == [5, 9, 9] and [len(loop) for loop in slow] == [5, 1, 1]
    for one, other in zip(fast, slow, strict=True):
        assert sorted(sample for batch in one + other for sample in batch) == list(range(20))


def test_the_ranks_of_a_worker_draw_its_batches_together() -> None:
    """Three ranks with a sample each of every batch: what one rank with batches of three draws."""
    of_one = Position()
    whole = [batch.tolist() for batch in loader(of_one, False, size=3) if steps(of_one)]  # type: ignore[attr-defined]
    parts = []
    for rank in range(3):
        position = Position()
        batches = loader(position, False, size=1, rank=rank, ranks=3)
        parts.append([batch.item() for batch in batches if steps(position)])  # type: ignore[attr-defined]
    assert [list(each) for each in zip(*parts, strict=True)] == whole and len(whole) == 2


def test_with_an_end_of_the_run_a_loop_goes_on_to_it() -> None:
    position = Position()
    drawn: Counter[int] = Counter()
    for batch in loader(position, endless=True):
        drawn.update(batch.tolist())  # type: ignore[attr-defined]
        position.done += 1
        position.finished = position.done == 9
    assert drawn == dict.fromkeys(range(6), 3)


def test_an_epoch_that_ends_within_a_step_goes_on_with_its_next_micro_batch() -> None:
    """Two epochs of three batches are three steps of two: no batch is drawn again, and none is left out."""
    position = Position()
    batches, drawn, count = loader(position, endless=False, micro_batches=2), Counter[int](), 0
    for _ in range(2):
        for batch in batches:
            drawn.update(batch.tolist())  # type: ignore[attr-defined]
            count += 1
            position.done = count // 2
    assert drawn == dict.fromkeys(range(6), 2)


@pytest.mark.parametrize(("samples", "workers", "batches"), [(12, 2, 3), (13, 2, 4), (12, 5, 2), (1, 2, 1)])
def test_the_length_is_that_of_deepspeeds_loader_with_as_many_ranks(samples: int, workers: int, batches: int) -> None:
    share = DataShare([samples], workers, 2, 1, rank=0, ranks=1)
    made = ShardedLoader(Numbers(samples), share, 1, None, Position, True, Loading(), lambda: 0)  # type: ignore[arg-type]
    assert len(made) == batches


def test_a_digest_tells_batches_apart_whatever_holds_their_tensors() -> None:
    """Of two batches at least; rows that are all equal show nothing."""

    def digest_of(*batches: object) -> str | None:
        first = BatchDigest()
        for batch in batches:
            first.note(batch)
        return first.take()

    ids, number = torch.arange(6).view(2, 3), torch.tensor
    assert digest_of(ids) is None
    assert digest_of(((), {"input_ids": ids}), ids) == digest_of([ids.clone()], ids) != digest_of([ids + 1], ids)
    assert digest_of([ids.bfloat16(), number(1.0)], ids) != digest_of([ids.bfloat16(), number(2.0)], ids)
    assert digest_of(("text", {"n": 1}), [torch.empty(0)], ids) is None
    assert digest_of(torch.ones(4, 3), torch.ones(4, 3)) is None
    assert digest_of(torch.ones(1, 3), torch.zeros(1, 3)) is not None
    assert digest_of(*[(ids, torch.ones(2, 3))] * 2) is not None, "one of its tensors has rows that differ"
    same = BatchDigest()
    for number in range(8):
        assert not same.closed, number
        same.note(torch.ones(4, 3))
        assert same.take() is None
    assert same.closed, "it shows nothing, and its hooks are not needed any more"


@pytest.mark.parametrize("passes", [range(9), range(0, 90, 10), [0, 1, 7, 8, 3, 2]], ids=["all", "some", "and back"])
def test_an_order_has_the_memory_of_two_passes_of_each_shard(passes: Sequence[int]) -> None:
    order = ShardOrder([4, 6], seed=1)
    for each in passes:
        for shard, size in enumerate(order.sizes):
            assert sorted(order.indices(shard, each * size, size)) == list(range(4 * shard, 4 * shard + size))
            order.indices(shard, each * size + 1, size)  # reaches into the next pass
            assert sum(number == shard for number, _ in order._orders) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_processes_make_the_batches_that_are_drawn_without_them(num_workers: int) -> None:
    """Also where the server gives another shard, or the same batches again, while others are made ahead."""
    position, order = Position(), ShardOrder([6, 6], seed=1)
    torch.manual_seed(1)
    following = torch.rand(1)
    torch.manual_seed(1)
    batches = iter(loader(position, endless=True, loading=Loading(num_workers)))
    for shard, offset in [(0, 0), (1, 7), (0, 2), (0, 2), (0, 6)]:
        position.sequence, position.shard, position.offset = position.sequence + 1, shard, offset
        for position.done in range(4):
            batch = next(batches)
            assert batch.tolist() == order.indices(shard, 2 * (offset + position.done), 2)  # type: ignore[attr-defined]
    assert torch.equal(torch.rand(1), following), "the model's dropout would be another than without processes"


def test_the_last_batch_of_a_pass_is_left_out_where_the_configuration_says_so() -> None:
    share = DataShare([7, 7], 2, 2, 1, rank=0, ranks=1)
    made = ShardedLoader(Numbers(14), share, 1, None, Position, False, Loading(drop_last=True), lambda: 0)  # type: ignore[arg-type]
    assert len(made) == len(list(made)) == 3


def test_batches_are_made_by_the_scripts_function() -> None:
    share = DataShare([3], 1, 3, 1, rank=0, ranks=1)
    made = ShardedLoader(Numbers(3), share, 1, sorted, Position, False, Loading(), lambda: 0)  # type: ignore[arg-type]
    assert list(made) == [[0, 1, 2]]


def test_how_the_data_is_read_is_what_deepspeeds_keys_say() -> None:
    sampling = {"num_workers": 2, "pin_memory": True}
    config = {"data_efficiency": {"data_sampling": sampling}, "dataloader_drop_last": True}
    assert loading_of(config, "ds.json") == Loading(2, True, True) and loading_of({}, "ds.json") == Loading()


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"num_workers": True}, '"num_workers" is True'),
        ({"num_workers": -1}, '"num_workers" is -1'),
        ({"num_workers": "auto"}, "\"num_workers\" is 'auto'"),
        ({"pin_memory": 1}, '"pin_memory" is 1'),
        ({"curriculum_learning": {"enabled": True}}, '"curriculum_learning" is not supported'),
    ],
)
def test_what_the_loader_cannot_do_is_refused(sampling: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        loading_of({"data_efficiency": {"data_sampling": sampling}}, "ds.json")


def test_a_loader_in_the_place_of_a_data_set_is_one_line() -> None:
    with pytest.raises(ConfigurationError, match="training_data is a DataLoader, without samples by number"):
        length_of(DataLoader([1, 2]))  # type: ignore[arg-type]


def test_a_shard_has_a_sample_at_least_and_is_a_part_of_data() -> None:
    assert sizes_of_shards(Numbers(3), 0, 3, "ds.json") == [1, 1, 1] == sizes_of_shards(Numbers(3), 3, 2, "ds.json")
    assert sizes_of_shards(None, 0, 3, "ds.json") == []
    for data, shards, said in (
        (Numbers(2), 3, "too few for 3 shards"),
        (None, 3, '"shards" needs'),
        ([], 0, "above 0"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            sizes_of_shards(data, shards, 2, "ds.json")


def arguments_with_data() -> Arguments:
    others = {"optimizer": "the script's", "lr_scheduler": None}
    return Arguments(None, None, Numbers(12), None, others, "file.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["set_train_batch_size", "set_train_micro_batch_size"])
def test_a_batch_size_by_which_the_loader_does_not_number_is_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine: Any = SimpleNamespace(
        workers=1, train_micro_batch_size_per_gpu=lambda: 2, gradient_accumulation_steps=lambda: 1
    )
    options: Any = SimpleNamespace(seed=1, total_steps=0)
    arguments_with_data().make_loader(engine, [12], options, (0, 1), Position, {})
    with pytest.raises(SystemExit):
        getattr(engine, name)(8)
    assert f"error: {name}(8): with training_data= the batch size stays" in capsys.readouterr().err


@pytest.mark.parametrize(("dealt", "most"), [(None, 1 + 2 + 16), (0, 1 + 3 * 2 + 16)])
def test_a_worker_may_have_nearly_all_micro_batches_of_a_step_where_the_server_divides_it(
    dealt: int | None, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three workers, with two micro-batches a step on average; 16 more may be drawn ahead."""
    share, position = DataShare([33] * 3, 3, 1, 2, 0, 1), Position()
    position.first_micro_batch, position.micro_batches = dealt, 2
    made = ShardedLoader(Numbers(99), share, 1, None, lambda: position, True, Loading(), lambda: next(trained))  # type: ignore[arg-type]
    trained = chain([0], repeat(1))
    batches, count = iter(made), 0
    with pytest.raises(SystemExit):
        for count, _ in enumerate(batches, 1):
            assert count < 60
    assert count == most + 1 and f"error: {most + 1} batches were drawn" in capsys.readouterr().err


@pytest.mark.parametrize("average", [1, 4])
def test_as_many_batches_in_each_step_as_the_configuration_says_are_drawn_for_any_number_of_steps(average: int) -> None:
    """Of an engine that has gone on from its seventh step."""
    engine: Any = SimpleNamespace(
        workers=1, train_micro_batch_size_per_gpu=lambda: 2, gradient_accumulation_steps=lambda: average, global_steps=7
    )
    options: Any = SimpleNamespace(seed=1, total_steps=100)
    made = arguments_with_data().make_loader(engine, [12], options, (0, 1), Position, {})
    assert made is not None
    for drawn, _ in enumerate(islice(made, 20 * average), 1):
        engine.global_steps = 7 + drawn // average


def test_more_batches_in_each_step_than_the_configuration_says_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Four batches a step and no "gradient_accumulation_steps": the next step would begin with the second of them."""
    steps, share = [0], DataShare([12], 1, 1, 1, 0, 1)
    made = ShardedLoader(Numbers(12), share, 1, None, Position, True, Loading(), lambda: steps[0])  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        for drawn, _ in enumerate(made, 1):
            steps[0] = drawn // 4
            assert drawn < 60
    (line,) = capsys.readouterr().err.splitlines()
    assert '"gradient_accumulation_steps" is 1: with training_data= give the number of batches of a step there' in line
    ahead = zip(made, range(60), strict=False)
    for drawn, _ in enumerate(ahead, 1):  # as many as in the configuration, ten of them drawn ahead
        steps[0] += drawn > 10


def test_the_loader_needs_steps_of_a_known_number_of_micro_batches() -> None:
    arguments_with_data().check({"managed_gradient_accumulation": True}, in_the_server=False)
    with pytest.raises(ConfigurationError, match='file.json: "managed_gradient_accumulation" is False: with training_'):
        arguments_with_data().check({"managed_gradient_accumulation": False}, in_the_server=False)


def test_a_group_draws_other_batches_after_a_step_that_was_skipped() -> None:
    engine: Any = SimpleNamespace(global_steps=3, skipped_steps=1, progress=2, finished=False)
    position, counter = GroupPosition(engine), BatchCounter(micro_batches=2, workers=1)
    assert [counter.next(position) for _ in range(2)] == [(0, 6), (0, 7)]


def test_a_loader_of_deepspeeds_own_is_of_this_ranks_part_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker takes itself for the whole world, and so would draw all of the data."""
    monkeypatch.setattr("deepspeed.runtime.engine.DeepSpeedDataLoader", SimpleNamespace)
    engine: Any = AsyncEngine.__new__(AsyncEngine)
    engine.collate_fn, engine.tput_timer, engine.mpu = None, None, None
    engine.global_rank, engine.local_rank, engine.dp_world_size = 0, 0, 1
    engine.curriculum_learning_enabled = engine.dataloader_drop_last = lambda: False
    engine.train_micro_batch_size_per_gpu = lambda: 2
    drawn = list[int]()
    for rank in range(4):
        engine.context = SimpleNamespace(ranks=4, global_rank=rank)
        drawn += engine.deepspeed_io(Numbers(8)).data_sampler
    assert sorted(drawn) == list(range(8))
    assert len(engine.deepspeed_io(Numbers(8), 2, "eval").data_sampler) == 8
    assert engine.deepspeed_io(Numbers(8), data_sampler=[1]).data_sampler == [1]
