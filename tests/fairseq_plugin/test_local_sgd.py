"""``--optimizer local_sgd`` in real ``fairseq-train`` processes."""

import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fairseq.optim.lr_scheduler import LR_SCHEDULER_REGISTRY
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule

from fairseq_async.environment import PLUGINS, WORKER
from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.refused import check_local_schedule
from tests.helpers.commands import HYBRID, MODEL, NAN_USER_DIR, PACKAGE, Processes, command
from tests.helpers.run_files import events, load, relative_differences, valid_losses

Alone = Callable[..., dict[str, tuple[int, str]]]
ADAM = ["--inner-optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", "5e-3"]
LOCAL = ["--optimizer", "local_sgd", *ADAM]
COMES_LATE = """  # worker 1 comes after worker 0's first checkpoint, and worker 0 goes on after worker 1's first update
import os, time

def wait_for(path, text):
    while not (os.path.exists(path) and text in open(path, "rb").read()):
        time.sleep(0.01)

def save_and_wait(*arguments, **keywords):
    save(*arguments, **keywords)
    wait_for({events!r}, b'"worker": 1,')

if os.environ.get({worker!r}) == "1":
    wait_for({last!r}, b"")
elif os.environ.get({worker!r}) == "0":
    from fairseq import checkpoint_utils
    save, checkpoint_utils.save_checkpoint = checkpoint_utils.save_checkpoint, save_and_wait
"""


def local_command(data: Path, workers: int, save_dir: Path, *flags: object) -> list[object]:
    ours = [command("fairseq-async"), "launch", "--workers", workers, "--"]
    return [*ours, "fairseq-train", data, *MODEL, *LOCAL, "--save-dir", save_dir, *flags]


def test_one_worker_whose_server_takes_its_steps_as_they_are_is_plain_training(alone: Alone, tmp_path: Path) -> None:
    """Outer SGD with learning rate 1: θ ← θ − (θ − θ_local), up to the rounding of two subtractions. Each step has the
    dropout masks of fairseq's."""
    sgd = ["sgd", "--lr", "0.5", "--dropout", 0.3, "--max-update", 20]
    outer = ["--outer", "sgd", "--outer-lr", 1.0, "--local-steps", 4, "--buffers", "average"]
    ours = ["--user-dir", PACKAGE, "--optimizer", "local_sgd", "--inner-optimizer", *sgd, *outer]
    ended = alone(plain=["--optimizer", *sgd], ours=ours)
    assert [code for code, _ in ended.values()] == [0, 0], ended
    differences = relative_differences(tmp_path / "plain/checkpoint_last.pt", tmp_path / "ours/checkpoint_last.pt")
    differences = {name: d for name, d in differences.items() if not name.endswith("k_proj.bias")}  # rounding noise
    assert max(differences.values()) < 1e-4
    assert [event["local_steps"] for event in events(tmp_path / "ours")] == [4] * 5
    histories = [load(tmp_path / run / "checkpoint_last.pt")["optimizer_history"][-1] for run in ("plain", "ours")]
    assert histories[0]["num_updates"] == histories[1]["num_updates"] == 20
    server = load(tmp_path / "ours" / "checkpoint_last.pt")["extra_state"]["async_server"]
    assert [name for name, _, kind in server["layout"] if "buffer" in kind] == ["encoder.version", "decoder.version"]
    assert server["server"]["parameters"][-2:].tolist() == [3.0, 3.0], "fairseq's version of a transformer"


def test_two_workers_learn_and_leave_what_was_promised(processes: Processes, data: Path, tmp_path: Path) -> None:
    method = ["--outer", "delayed_nesterov", "--dynamic-local-steps", "--grace-period", "0.5"]
    flags = [*method, "--local-steps", 5, "--max-epoch", 12, "--save-interval", 4, "--max-update", 400]
    code, output = processes.run(local_command(data, 2, tmp_path, *flags))
    assert code == 0, output
    losses = valid_losses(tmp_path / "logs" / "worker-0.log")
    left = events(tmp_path)
    first = left[0]["loss"] / math.log(2)  # in bits, as fairseq's log has it
    assert len(losses) > 2 and losses[-1] < first - 0.5  # worker 0 may validate late, when much is learned
    assert {event["worker"] for event in left} == {0, 1}
    assert all(1 <= event["local_steps"] <= 5 and event["tokens"] >= 0 for event in left)
    assert sum(event["epochs"] for event in left) == pytest.approx(12, abs=0.5)
    state = load(tmp_path / "checkpoint_last.pt")
    server = state["extra_state"]["async_server"]["server"]
    assert torch.isfinite(server["parameters"]).all() and server["rule"]["momentum_buffer"] is not None
    assert state["last_optimizer_state"]["state"]  # the inner optimizer's moments
    generate = [command("fairseq-generate"), data, "--path", tmp_path / "checkpoint_best.pt", "--beam", 1, "--cpu"]
    code, output = processes.run(generate)  # plain fairseq, without our directory
    assert code == 0 and "BLEU4" in output, output


@pytest.mark.parametrize("method", [LOCAL + ["--local-steps", "3"], HYBRID], ids=["local_sgd", "hybrid"])
def test_a_worker_that_comes_after_the_first_checkpoint_begins_with_its_own_data(
    processes: Processes, data: Path, tmp_path: Path, method: list[str]
) -> None:
    """It does not go on where worker 0 was when it saved; a replay, which has no checkpoint, finds the same."""
    last, late = tmp_path / "run" / "checkpoint_last.pt", tmp_path / "late.py"
    late.write_text(COMES_LATE.format(worker=WORKER, last=str(last), events=str(last.parent / "events.jsonl")))
    launch = [command("fairseq-async"), "launch", "--workers", 2, "--", "fairseq-train", data, *MODEL, *method]
    flags = ["--max-update", 30, "--disable-validation", "--record", "--save-dir", last.parent]
    code, output = processes.run([*launch, *flags], **{PLUGINS: str(late)})
    assert code == 0, output
    first = next(event for event in events(last.parent) if event["worker"] == 1)
    place = first["position"]["epoch"], first["position"]["iterations_in_epoch"]
    assert first["base_version"] > 0 and place == (1, first.get("local_steps", 1)), first
    code, output = processes.run([command("fairseq-async"), "replay", last.parent])
    assert code == 0 and "all equal to the recorded ones" in output, output


def test_a_batch_that_fills_up_an_epoch_takes_none_from_those_accumulated_with_it(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    """fairseq would not divide the gradient of such a step by its tokens."""
    flags = ["--outer", "diloco", "--local-steps", 1, "--update-freq", 5, "--max-epoch", 3]
    code, output = processes.run(local_command(data, 2, tmp_path, *flags))
    assert code == 0, output
    left = events(tmp_path)
    assert len(left) > 12 and all(event["tokens"] > 0 for event in left)  # the first one's too


def test_gradients_with_nan_are_left_out_in_bf16(processes: Processes, data: Path, tmp_path: Path) -> None:
    """They would stay in fairseq's factor of the gradients."""
    flags = ["--user-dir", NAN_USER_DIR, "--local-steps", 4, "--max-update", 12, "--bf16"]
    code, output = processes.run(local_command(data, 1, tmp_path, *flags), SPOILT_BATCHES="2")
    assert code == 0, output
    assert {event["status"] for event in events(tmp_path)} == {"applied"}
    moments = load(tmp_path / "checkpoint_last.pt")["last_optimizer_state"]["state"]
    assert all(torch.isfinite(moment["exp_avg"]).all() for moment in moments.values())


def test_in_fp16_a_batch_that_overflows_is_skipped_and_a_loss_scale_at_its_minimum_is_one_line(
    alone: Alone, tmp_path: Path
) -> None:
    """On a CPU too, where fairseq's own trainer fails at an overflow."""
    flags = ["--user-dir", PACKAGE, *LOCAL, "--local-steps", 4, "--max-update", 8, "--fp16-init-scale", 2**18]
    masters = [*flags, "--fp16", "--fp16-no-flatten-grads"]
    ended = alone(
        masters=masters,
        efficient=[*flags, "--memory-efficient-fp16"],
        exploding=[*masters, "--min-loss-scale", 2**17],
    )
    for name in ("masters", "efficient"):
        code, output = ended[name]
        assert code == 0, output
        skipped = output.count("gradient overflow, batch skipped, setting loss scale to")
        assert skipped >= 2, output  # a gradient of 1 is 2¹⁸, and 65504 is the largest number
        assert [event["local_steps"] for event in events(tmp_path / name)] == [4] * 2
        saved = load(tmp_path / name / "checkpoint_last.pt")
        assert saved["last_optimizer_state"]["loss_scale"] == 2**18 / 2**skipped
        assert saved["extra_state"]["train_iterator"]["iterations_in_epoch"] == 8 + skipped
        assert all(
            torch.isfinite(moment["exp_avg"]).all() for moment in saved["last_optimizer_state"]["state"].values()
        )
    code, output = ended["exploding"]
    assert code == 2 and "error: Minimum loss scale reached" in output and "Traceback" not in output


def test_two_workers_train_a_language_model(processes: Processes, tmp_path: Path) -> None:
    """Of sentences in which each word says what the next one is; local steps start ahead of the parameters."""
    sentences = [" ".join(f"w{(start + 3 * step) % 50}" for step in range(12)) for start in range(50)]
    (tmp_path / "train").write_text("\n".join(sentences * 20))
    (tmp_path / "valid").write_text("\n".join(sentences))
    prefixes = ["--trainpref", tmp_path / "train", "--validpref", tmp_path / "valid", "--destdir", tmp_path / "bin"]
    code, output = processes.run([command("fairseq-preprocess"), "--only-source", *prefixes])
    assert code == 0, output
    model = "--task language_modeling --arch transformer_lm --decoder-layers 1 --decoder-embed-dim 32 --max-tokens 256"
    model += " --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --tokens-per-sample 32 --log-format json"
    method = ["--outer", "heloco", "--outer-momentum", 0.5, "--local-steps", 5, "--max-update", 100]
    launcher = [command("fairseq-async"), "launch", "--workers", 2, "--", "fairseq-train", tmp_path / "bin"]
    code, output = processes.run([*launcher, *model.split(), *LOCAL, *method, "--save-dir", tmp_path / "run"])
    assert code == 0, output
    assert sum(event["local_steps"] for event in events(tmp_path / "run")) == 200
    assert valid_losses(tmp_path / "run" / "logs" / "worker-0.log")[-1] < 3  # who knows nothing has log₂ 50, 5.6


def test_a_run_on_the_parameters_of_another_is_one_of_its_own(alone: Alone, tmp_path: Path) -> None:
    flags = ["--user-dir", PACKAGE, *LOCAL, "--local-steps", 5, "--dropout", 0, "--max-epoch", 0]
    new = ["--restore-file", tmp_path / "first/checkpoint_last.pt", "--reset-optimizer", "--bf16", "--max-update", 5]
    ended = alone(first=[*flags, "--max-update", 40], new=[*flags, *new])
    assert [code for code, _ in ended.values()] == [0] * 2, ended
    first, begun = events(tmp_path / "first")[0], events(tmp_path / "new")
    assert [event["base_version"] for event in begun] == [0]
    assert begun[0]["loss"] < first["loss"] - 0.35


@pytest.mark.parametrize(
    "method", [[*LOCAL, "--local-steps", 5], ["--optimizer", "hybrid_async"]], ids=["local", "hybrid"]
)
def test_a_resumed_run_goes_on_with_what_it_had_not_sent(alone: Alone, tmp_path: Path, method: list[object]) -> None:
    codecs = "topk:chunk=256,keep=16,pull=int8"
    flags = ["--user-dir", PACKAGE, *method, "--dropout", 0, "--max-epoch", 0, "--compress", codecs]
    parts = [*flags, "--save-dir", tmp_path / "parts"]
    ended = alone(
        whole=[*flags, "--max-update", 20],
        first=[*parts, "--save-interval-updates", 10, "--max-update", 10],
        second=[*parts, "--max-update", 20],
    )
    assert [code for code, _ in ended.values()] == [0] * 3, ended
    differences = relative_differences(tmp_path / "whole/checkpoint_last.pt", tmp_path / "parts/checkpoint_last.pt")
    assert max(differences.values()) == 0.0
    norms = [[event["residual_norm"] for event in events(tmp_path / run)] for run in ("whole", "parts")]
    assert norms[0] == norms[1] and norms[0][0] == 0.0 and min(norms[0][1:]) > 0.0


def test_a_users_schedule_that_follows_losses_is_refused_as_fairseqs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(ReduceLROnPlateauLRSchedule):  # type: ignore[misc]
        pass

    monkeypatch.setitem(LR_SCHEDULER_REGISTRY, "mine", Mine)
    args = Namespace(optimizer="local_sgd", lr_scheduler="mine")
    check_local_schedule(args, 1)
    with pytest.raises(
        ConfigurationError, match="--lr-scheduler mine: not possible with --optimizer local_sgd and sev"
    ):
        check_local_schedule(args, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--outer", "adagrad"], "--optimizer local_sgd: --outer: Input should be 'diloco'"),
        (["--compress", "gzip"], "--compress: there is no codec 'gzip'"),
        (["--outer", "delayed_nesterov", "--c", 0.9], "--c is 0.9: with --delay 2 it must be in"),
        (["--amp"], "--amp: not possible with --optimizer local_sgd"),
        (["--fp16", "--cpu"], "--fp16: fairseq needs a GPU for it; use --bf16, or leave it out"),
        (["--lr-scheduler", "reduce_lr_on_plateau"], "reduce_lr_on_plateau: not possible with --optimizer local_sgd"),
    ],
)
def test_a_mistake_is_one_line(refused: Callable[..., str], flags: list[object], message: str) -> None:
    assert message in refused(*LOCAL, "--distributed-world-size", 1, "--max-update", 10, *flags)
