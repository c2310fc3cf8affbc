"""Each cell of docs/capabilities.json is what the front end says of it, by its own checks of options and models."""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairseq_async.deepspeed_plugin import config as configuration
from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin import flags, refused
from fairseq_async.fairseq_plugin.synchronous.adascale import AdaScaleTrainer
from fairseq_async.fairseq_plugin.synchronous.adasum import AdasumTrainer
from fairseq_async.method.methods import SYNCHRONOUS
from fairseq_async.pytorch import AsyncLocalSGD, HybridAsync
from fairseq_async.worker.start import world
from fairseq_async.worker.start.context import WorkerContext
from scripts.capability_tables import COLUMNS, FILE, GPU, PAGE, REFUSED, updated
from tests.helpers.commands import ROOT
from tests.helpers.fairseq_flags import parsed

METHODS: dict[str, dict[str, dict[str, str]]] = json.loads(FILE.read_text(encoding="utf-8"))["methods"]
Probe = Callable[[pytest.MonkeyPatch, str, str], None]


def fairseq(patch: pytest.MonkeyPatch, method: str, column: str) -> None:
    given = {
        "bf16": ["--bf16"],
        "fp16": ["--fp16"],
        "ZeRO": ["--zero-sharding", "os"],
        "islands": ["--distributed-world-size", 2],
        "compressed": ["--compress", "int8"],
        "sharded": ["--server-shards", 2],
    }.get(column, [])
    patch.setattr(refused.torch.cuda, "is_available", lambda: True)  # as where --fp16 was tested
    if method in SYNCHRONOUS:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            patch.setenv(name, value)
        trainer = AdasumTrainer if method == "adasum" else AdaScaleTrainer
        return trainer.check(parsed(patch, "--optimizer", method, "--inner-optimizer", "sgd", *given))
    patch.setattr(refused, "ranks_of_launcher", lambda: 2 if column == "islands" else 1)
    patch.setattr(refused, "enter_world", lambda ranks: None)
    cfg = parsed(patch, "--optimizer", method, *given)
    describe = flags.describe_hybrid if method == "hybrid_async" else flags.describe_local_sgd
    describe(cfg.optimizer, cfg, 2)


def deepspeed(patch: pytest.MonkeyPatch, method: str, column: str) -> None:
    section = {
        "islands": {"island_size": 2},
        "compressed": {"compress": "int8"},
        "sharded": {"server_shards": 2},
    }.get(column, {})
    half = {"enabled": True}
    keys: dict[str, Any] = {
        "bf16": {"bf16": half},
        "fp16": {"torch_autocast": half | {"dtype": "float16"}} if method in SYNCHRONOUS else {"fp16": half},
        "ZeRO": {"zero_optimization": {"stage": 1}},
    }.get(column, {})
    given = keys | {configuration.SECTION: {"method": method, **section}}
    plain, common, options = configuration.split(given, "ds.json")
    configuration.check(plain, options, common, "ds.json")
    if method in SYNCHRONOUS:
        configuration.check_group(common, method, "ds.json")


def pytorch(patch: pytest.MonkeyPatch, method: str, column: str) -> None:
    if method in SYNCHRONOUS:
        return  # a hook and a class, whose tests are in the table
    model: nn.Module = nn.Linear(2, 2)
    if column == "islands":
        patch.setattr(world, "_entered", [WorkerContext(0, 2, rank=1, island_size=2)])
        model = nn.parallel.DistributedDataParallel(model)
    options: dict[str, Any] = {"compressed": {"compress": "int8"}, "sharded": {"server_shards": 2}}.get(column, {})
    front_end = HybridAsync if method == "hybrid_async" else AsyncLocalSGD
    front_end(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def trainer(patch: pytest.MonkeyPatch, method: str, column: str) -> None:
    patch.setitem(sys.modules, "torchaudio", None)  # transformers would import it; it may not fit this torch
    hf_trainer = importlib.import_module("fairseq_async.pytorch.hf_trainer")
    if column == "islands":
        patch.setenv("RANK", "0")  # what torchrun sets
    patch.setattr(hf_trainer, "wrap", lambda *_: None)  # the Trainer of other tests in this process stays as it is
    patch.setattr(hf_trainer, "Division", lambda *_: None)
    for name in ("_divisions", "_callbacks"):
        patch.setattr(hf_trainer, name, [])
    hf_trainer.AsyncCallback(method)


PROBES: dict[str, Probe] = {
    "fairseq": fairseq,
    "DeepSpeed": deepspeed,
    "Trainer with DeepSpeed": deepspeed,
    "Trainer": trainer,
    "PyTorch": pytorch,
}
CASES = [(method, front_end) for method, rows in METHODS.items() for front_end in rows]


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("method", "front_end"), CASES)
def test_a_cell_is_what_the_front_end_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str, front_end: str
) -> None:
    """What is refused says so; what was tested is taken. A cell without an entry may be either."""
    wrong = []
    for column, cell in METHODS[method][front_end].items():
        with monkeypatch.context() as patch:
            said = ""
            try:
                PROBES[front_end](patch, method, column)
            except ConfigurationError as error:
                said = str(error)
            except SystemExit:
                said = capsys.readouterr().err
                assert "error: " in said
        if bool(said) is not (cell == REFUSED):
            wrong.append(f"{column} is {cell}, and the front end says: {said or 'nothing'}")
    assert not wrong, "\n".join(wrong)


def test_every_test_or_page_of_a_cell_exists_and_is_of_its_kind() -> None:
    missing = []
    cells = [cell for rows in METHODS.values() for row in rows.values() for cell in row.values() if cell != REFUSED]
    for cell in cells:
        path, _, test = cell.removeprefix(GPU).partition("::")
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        found = re.search(rf"^def {test}\(", text, re.MULTILINE) if test else cell.startswith(GPU)
        if not (text and found) or path.startswith("tests/gpu/") is not (cell.startswith(GPU) and bool(test)):
            missing.append(cell)
    assert len(cells) > 40 and missing == []


def test_the_page_has_the_tables_of_the_file() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert updated(text) == text
    assert set(METHODS) == {"hybrid_async", "local_sgd", *SYNCHRONOUS}
    assert {column for rows in METHODS.values() for row in rows.values() for column in row} == set(COLUMNS)
