"""fairseq's own options, models and tasks under our methods: early stopping, scores, other architectures."""

import json
import subprocess
from pathlib import Path

import pytest

from fairseq_async.errors import ConfigurationError
from fairseq_async.launch.command.programs import is_fairseq
from fairseq_async.records.validations import VALIDATIONS
from tests.helpers.commands import ROOT, Processes, command
from tests.helpers.run_files import events, load_without_trust

LSTM = (
    "--task translation --arch lstm --encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-hidden-size 32 "
    "--decoder-hidden-size 32 --decoder-out-embed-dim 32 --criterion cross_entropy --max-tokens 400 --lr 1e-9 --seed 3 "
    "--num-workers 0 --log-format json --optimizer hybrid_async"
).split()
LANGUAGE_MODEL = (
    "--task language_modeling --arch transformer_lm --decoder-layers 1 --decoder-embed-dim 32 "
    "--decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --tokens-per-sample 32 --max-tokens 256 --lr 2e-3 "
    "--seed 3 --num-workers 0 --optimizer local_sgd --outer sgd --outer-lr 1.0 "
    "--local-steps 5 --max-epoch 6 --no-epoch-checkpoints "
    "--log-format json"
).split()
ALL_TASKS = {"PYTHONPATH": str(ROOT)}


def launch(processes: Processes, *job: object) -> str:
    ours = [command("fairseq-async"), "launch", "--workers", 2, "--", "fairseq-train"]
    code, output = processes.run([*ours, *job], **ALL_TASKS)
    assert code == 0, output[-3000:]
    return output


def test_an_lstm_stops_when_its_bleu_no_longer_rises_and_keeps_the_last_epochs(
    processes: Processes, data: Path, tmp_path: Path
) -> None:
    """With this learning rate no score rises: the first is the best, and the third after it ends the run."""
    bleu = ["--eval-bleu", "--eval-bleu-args", '{"beam": 1, "max_len_b": 5}', "--best-checkpoint-metric", "bleu"]
    stop = ["--maximize-best-checkpoint-metric", "--patience", 3, "--keep-last-epochs", 2, "--max-epoch", 50]
    output = launch(processes, data, *LSTM, *bleu, *stop, "--save-dir", tmp_path)
    validations = [json.loads(line) for line in (tmp_path / VALIDATIONS).open()]
    assert [each["epoch"] for each in validations] == [1, 2, 3, 4]
    assert {each["metric"] for each in validations} == {"bleu"}
    assert {each.name for each in tmp_path.glob("checkpoint*.pt")} == {
        "checkpoint3.pt",
        "checkpoint4.pt",
        "checkpoint_best.pt",
        "checkpoint_last.pt",
    }
    assert "finished: update " in output and "of 50" in output and ", bleu 0." in output
    assert {event["worker"] for event in events(tmp_path)} == {0, 1}
    load_without_trust(tmp_path / "checkpoint_best.pt")


def test_a_language_model_learns(processes: Processes, data: Path, tmp_path: Path) -> None:
    """Its words are drawn from 60 at random: nobody predicts them with less than about log2(60) bits, 5.9."""
    texts = [f"--{split}pref={data.parent / split}.a" for split in ("train", "valid")]
    preprocess = [command("fairseq-preprocess"), "--only-source", *texts, "--destdir", str(tmp_path / "bin")]
    subprocess.run(preprocess, check=True, capture_output=True, timeout=120)
    launch(processes, tmp_path / "bin", *LANGUAGE_MODEL, "--save-dir", tmp_path / "run")
    validations = [json.loads(line) for line in (tmp_path / "run" / VALIDATIONS).open()]
    assert validations[-1]["loss"] < 6.3 and validations[-1]["metric"] == "ppl"


def test_hydras_program_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="fairseq-hydra-train: the methods are flags of fairseq-train"):
        is_fairseq(["/usr/bin/fairseq-hydra-train", "task.data=data"])


def test_the_directory_of_the_plugin_itself_is_refused_as_user_dir(processes: Processes, tmp_path: Path) -> None:
    """fairseq imports it by another name, and would register every optimizer twice."""
    job = [command("fairseq-train"), tmp_path, "--user-dir", ROOT / "fairseq_async" / "fairseq_plugin"]
    code, output = processes.run([*job, "--optimizer", "hybrid_async"])
    assert code == 2
    assert "give the directory above, fairseq_async" in output and "Traceback" not in output
