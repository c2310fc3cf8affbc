"""What worker 0's validations are compared by, and what a checkpoint that cannot be read is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.compat.checkpoints import checkpoint_errors
from fairseq_async.fairseq_plugin.validations import note_validation
from fairseq_async.records.validations import VALIDATIONS, parse_validation


def note(metric: str, stats: dict[str, Any]) -> dict[str, Any]:
    cfg = SimpleNamespace(checkpoint=SimpleNamespace(best_checkpoint_metric=metric))
    return note_validation(lambda *given: given[2], cfg, SimpleNamespace(), stats, True)


def test_a_score_that_no_validation_has_is_one_line_with_those_that_it_has() -> None:
    with pytest.raises(ConfigurationError, match="^--best-checkpoint-metric blue: a validation has loss, bleu$"):
        note("blue", {"loss": 1.0, "bleu": 30.0})
    assert note("bleu", {"loss": 1.0, "bleu": 30.0})["bleu"] == 30.0


def test_a_validation_is_recorded_with_its_loss_and_the_first_score_besides(tmp_path: Path) -> None:
    session = SimpleNamespace(run_dir=tmp_path, context=SimpleNamespace(rank=0))
    trainer = SimpleNamespace(session=session, validated_epoch=2, get_num_updates=lambda: 7)
    cfg = SimpleNamespace(checkpoint=SimpleNamespace(best_checkpoint_metric="loss"))
    for stats, best in (({"loss": 1.5, "ppl": 3.0}, True), ({"loss": 2.5, "wer": 9.0}, True), ({"loss": 8.0}, False)):
        note_validation(lambda *given: given[2], cfg, trainer, stats, best)
    found = map(parse_validation, (tmp_path / VALIDATIONS).read_bytes().splitlines())
    wanted = [(7, 2, 1.5, "ppl", 3.0), (7, 2, 2.5, None, None)]
    assert [(each.updates, each.epoch, each.loss, each.metric, each.score) for each in found] == wanted


def test_a_file_that_is_no_checkpoint_is_one_line_with_its_name(tmp_path: Path) -> None:
    torch.save({"model": torch.ones(1000)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:700])
    (tmp_path / "empty.pt").touch()
    (tmp_path / "other.pt").write_text("text")
    for name in ("cut.pt", "empty.pt", "other.pt"):
        with pytest.raises(ConfigurationError, match=f"{name} is no checkpoint that can be read"):
            with checkpoint_errors(str(tmp_path / name)):
                torch.load(tmp_path / name, weights_only=True)


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), checkpoint_errors("x.pt"):
        raise RuntimeError("out of memory")
    with pytest.raises(ConfigurationError, match="^x.pt: please reset the optimizer"), checkpoint_errors("x.pt"):
        raise AssertionError("please reset the optimizer")


def test_of_the_ranks_of_a_worker_one_records_a_validation(tmp_path: Path) -> None:
    cfg = SimpleNamespace(checkpoint=SimpleNamespace(best_checkpoint_metric="loss"))
    trainer = SimpleNamespace(validated_epoch=2, get_num_updates=lambda: 7)
    for rank in (0, 1):
        trainer.session = SimpleNamespace(run_dir=tmp_path, context=SimpleNamespace(rank=rank))
        note_validation(lambda *given: given[2], cfg, trainer, {"loss": 1.5}, True)
    assert len((tmp_path / VALIDATIONS).read_bytes().splitlines()) == 1
