"""Workers of several ranks: inside each, fairseq is a plain distributed run."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin import flags as flags_of
from fairseq_async.fairseq_plugin import refused
from tests.helpers.commands import ROOT, Processes, synchronous
from tests.helpers.fairseq_flags import parsed
from tests.helpers.run_files import events, relative_differences

Launch = Callable[..., tuple[int, str]]
ADAM = ["--adam-betas", "(0.9, 0.98)"]
FP16 = ["--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 16]  # else fairseq needs a GPU for it
LOCAL = "--optimizer local_sgd --inner-optimizer adam --outer sgd --outer-lr 1.0 --local-steps 4".split()


@pytest.mark.parametrize(
    ("flags", "method", "tolerance"),
    [
        ([*ADAM, "--max-update", 8], ["--updates-per-step", 1, "--ddp-backend", "pytorch_ddp"], 0.0),
        ([*ADAM, "--max-update", 8, "--update-freq", 2], LOCAL, 1e-6),
    ],
    ids=["hybrid_async", "local_sgd"],
)
def test_one_worker_of_two_ranks_is_plain_fairseq_on_two(
    launch: Launch,
    processes: Processes,
    data: Path,
    tmp_path: Path,
    flags: list[object],
    method: list[object],
    tolerance: float,
) -> None:
    """But for the rounding of θ − (θ − θ'), and for a key's bias, whose gradient is rounding noise that Adam scales."""
    synchronous(processes, data, tmp_path / "plain", 2, "--optimizer", "adam", *flags)
    code, output = launch(1, tmp_path / "ours", *method, *flags, launcher=["--ranks-per-worker", 2])
    assert code == 0, output
    found = relative_differences(tmp_path / "plain/checkpoint_last.pt", tmp_path / "ours/checkpoint_last.pt")
    assert len(found) > 30 and max(value for name, value in found.items() if "k_proj.bias" not in name) <= tolerance
    assert {event["worker"] for event in events(tmp_path / "ours")} == {0}


@pytest.mark.parametrize(
    ("method", "flags"),
    [
        (["--updates-per-step", 1], ["--bf16", "--ddp-backend", "pytorch_ddp", "--update-freq", 2]),
        (["--updates-per-step", 1], [*FP16, "--ddp-backend", "legacy_ddp"]),
        (LOCAL, ["--bf16", "--ddp-backend", "legacy_ddp"]),
        (LOCAL, [*FP16, "--ddp-backend", "pytorch_ddp", "--update-freq", 2]),
    ],
    ids=["hybrid bf16", "hybrid fp16", "local bf16", "local fp16"],
)
def test_in_half_precision_too_a_worker_of_two_ranks_is_plain_fairseq_to_the_bit(
    launch: Launch, processes: Processes, data: Path, tmp_path: Path, method: list[object], flags: list[object]
) -> None:
    """Without clipping, of which plain fairseq rounds the factor together with another one. A local SGD of one worker
    is as exact: θ − (θ − θ') is θ' in fp32 where a step is small beside the parameter."""
    common = [*ADAM, *flags, "--max-update", 8, "--clip-norm", 0]
    plain = ["--optimizer", "adam", "--user-dir", ROOT / "scripts/bench/plain_on_cpu"]
    synchronous(processes, data, tmp_path / "plain", 2, *plain, *common)
    code, output = launch(1, tmp_path / "ours", *method, *common, launcher=["--ranks-per-worker", 2])
    assert code == 0, output
    found = relative_differences(tmp_path / "plain/checkpoint_last.pt", tmp_path / "ours/checkpoint_last.pt")
    assert len(found) > 30 and set(found.values()) == {0.0}


@pytest.mark.parametrize(("sizes", "ranks"), [("2", 4), ("1,2", 3)])
def test_workers_of_several_ranks_with_a_barrier_are_plain_fairseq_on_all_of_them(
    launch: Launch, processes: Processes, data: Path, tmp_path: Path, sizes: str, ranks: int
) -> None:
    """12 updates reach into the next epochs, whose ends have a batch for some ranks only."""
    flags = ["--momentum", "0.9", "--max-update", 12, "--lr", "0.5"]
    synchronous(processes, data, tmp_path / "plain", ranks, "--optimizer", "sgd", *flags)
    method = ["--inner-optimizer", "sgd", "--barrier", *flags]
    code, output = launch(2, tmp_path / "ours", *method, launcher=["--ranks-per-worker", sizes])
    assert code == 0, output
    found = relative_differences(tmp_path / "plain/checkpoint_last.pt", tmp_path / "ours/checkpoint_last.pt")
    assert len(found) > 30 and max(found.values()) < 1e-6
    passes = sum(event["epochs"] for event in events(tmp_path / "ours"))
    assert {event.get("ranks") for event in events(tmp_path / "ours")} >= {2}
    assert passes == pytest.approx(12 * ranks / 27, rel=0.2)


@pytest.mark.parametrize(
    ("method", "flags", "message"),
    [
        ("hybrid_async", ["--record"], "--record, in workers of several ranks: not possible"),
        ("hybrid_async", ["--shares", "auto", "--update-freq", 4], "--shares auto, in workers of several ranks: not"),
        ("local_sgd", ["--shards", 2], "--shards, in workers of several ranks: not possible"),
        ("local_sgd", ["--overlap"], "--optimizer local_sgd: --overlap is not supported in a worker of several"),
    ],
)
def test_what_several_ranks_do_not_have_is_one_line(
    monkeypatch: pytest.MonkeyPatch, method: str, flags: list[object], message: str
) -> None:
    cfg = parsed(monkeypatch, "--optimizer", method, *flags)
    cfg.distributed_training.distributed_world_size = 2
    describe = flags_of.describe_hybrid if method == "hybrid_async" else flags_of.describe_local_sgd
    with pytest.raises(ConfigurationError, match=message):
        describe(cfg.optimizer, cfg, 2)


@pytest.mark.parametrize(("ranks", "given", "says"), [(4, 4, True), (4, 2, False), (4, 1, False)])
def test_ranks_that_are_all_one_worker_are_said_to_train_synchronously(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ranks: int, given: int, says: bool
) -> None:
    """As many as torchrun has started, which plain fairseq would be given."""
    entered: list[int] = []
    monkeypatch.setattr(refused, "enter_world", entered.append)
    monkeypatch.setattr(sys, "argv", ["fairseq-train", "--distributed-world-size", str(given)])
    for name, value in {"RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert refused.enter_worker("adam") == ("adam", given) and entered == [given] * (given > 1)
    assert (f"all {ranks} ranks are one worker, which trains synchronously" in capsys.readouterr().err) is says
