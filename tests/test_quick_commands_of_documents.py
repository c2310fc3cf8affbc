"""The quick commands of the documents, run for real on stand-ins for a reader's files.

Those that train are run by ``test_commands_of_documents.py``. Of those that measure for hours, the options are parsed
here.
"""

import importlib.util
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
import yaml

from fairseq_async import cli
from fairseq_async.export import export
from fairseq_async.reporting import watch
from fairseq_async.worker.start.server_process import ServerProcess
from scripts.faults.sgd_server import sgd_spec
from tests.helpers.documents import QUICK, ROOT, commands
from tests.helpers.server_client import SGD_SERVER, join, push

RUNS = ("RUN_DIR", "RUN", "RUN_OR_EXPERIMENT")  # as the documents name them
MADE = ("OUT", "model.safetensors", "runs", "tls")  # by a command, and removed before the next
UPDATES = 12


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a real server and a worker, interrupted: with its last snapshot."""
    directory = tmp_path_factory.mktemp("run")
    server = ServerProcess(SGD_SERVER, 1, directory, directory / "logs" / "server.log")
    client = join(server, 0, workers=1)
    for sequence in range(UPDATES):
        push(client, sequence, 0.25, base=sequence, loss=3.0)
    server.end(30)
    return directory


@pytest.fixture
def readers_files(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with everything that a command names."""
    monkeypatch.chdir(tmp_path)
    for name in RUNS:
        shutil.copytree(run_dir, name)
    Path("RUN|CHECKPOINT").mkdir()  # as that of the Trainer of transformers
    shutil.copy(sorted(run_dir.glob("snapshots/version-*.pt"))[-1], "RUN|CHECKPOINT/async_server.pt")
    Path("RUN|CHECKPOINT", "config.json").write_text("{}")
    Path("DIR").mkdir()
    Path("DIR", "config.json").write_text("{}")
    for directory in ("RUN|CHECKPOINT", "DIR"):
        export(run_dir, Path(directory, "model.safetensors"))  # names to compare with
    Path("checkpoints").mkdir()
    content = {"model": {"weight": torch.zeros(2)}, "cfg": {"task": {"_name": "translation"}}, "extra_state": {}}
    torch.save(content, "checkpoints/checkpoint_best.pt")
    for path in (ROOT / "recipes" / "paper").glob("*toy.yaml"):
        whole = yaml.safe_load(path.read_text())
        quick = {"steps": 2, "pretraining": {"steps": 1}, "problem": {"type": "gaussians", "samples": 64}}
        wanted = {*list(whole["methods"])[:2], *([whole["target"]["of"]] if "target" in whole else [])}
        few = {"methods": {name: whole["methods"][name] for name in sorted(wanted)}}
        if "clusters" in whole:
            few["clusters"] = dict(list(whole["clusters"].items())[:1])
        (Path("recipes") / "paper").mkdir(parents=True, exist_ok=True)
        Path("recipes", "paper", path.name).write_text(yaml.safe_dump(whole | quick | few, sort_keys=False))
    return tmp_path


def interrupted(seconds: float) -> None:
    """Ctrl-C, where a live view would wait."""
    raise KeyboardInterrupt


def test_every_quick_command_of_ours_does_what_its_page_says(
    readers_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography")  # for certificates
    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=interrupted, monotonic=lambda: 0.0))
    found = [words for _, words in commands("fairseq-async") if words[1] in QUICK]
    assert {words[1] for words in found} == set(QUICK)
    for words in found:
        for name in MADE:
            shutil.rmtree(name, ignore_errors=True)
            Path(name).unlink(missing_ok=True)
        monkeypatch.setattr(sys, "argv", [word for word in words if word not in ("...", "…")])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        assert not end.value.code and (said.out or said.err), f"{' '.join(words)}: {said}"
        PROOFS.get(words[1], lambda out: None)(said.out)


def exported(out: str) -> None:
    assert "the server's parameters, as " in out
    assert Path("model.safetensors").is_file() or Path("OUT", "model.safetensors").is_file()


def audited(out: str) -> None:
    assert f"version {UPDATES}: each of {UPDATES} applied updates counts once" in out


def reported(out: str) -> None:
    assert Path(out.split()[-1]).read_text().startswith("<!doctype html>")


PROOFS: dict[str, Callable[[str], None]] = {
    "export": exported,
    "audit": audited,
    "report": reported,
    "simulate": reported,
}


def main_of(script: Path) -> Callable[..., None] | None:
    """The function whose arguments are the options of a program, or of that which a shell script ends with."""
    if script.suffix == ".sh":
        behind = re.search(r'exec python (\S+\.py) "\$@"$', script.read_text(encoding="utf-8"), re.MULTILINE)
        return main_of(ROOT / behind[1]) if behind else None
    if not re.search(r"\b(typer\.run|run_main)\(main\)", script.read_text(encoding="utf-8")):
        return None
    spec = importlib.util.spec_from_file_location(f"of_a_document_{script.stem}", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    main: Callable[..., None] = module.main
    return main


def test_a_program_takes_the_options_and_values_that_a_document_gives_it(readers_files: Path) -> None:
    Path("runs/bench/local_sgd/*-1/async").mkdir(parents=True)  # the shell leaves a pattern that it finds nothing for
    parsed = 0
    for document, words in commands("python", "bash"):
        script = next((ROOT / word for word in words[1:] if re.search(r"\.(py|sh)$", word)), ROOT)
        main = main_of(script) if script.is_file() else None
        if main is None:
            continue
        app = typer.Typer()
        app.command()(main)
        given = words[words.index(str(script.relative_to(ROOT))) + 1 :]
        try:
            typer.main.get_command(app).make_context(script.name, given)
        except Exception as error:
            pytest.fail(f"{document}: {' '.join(words)}: {getattr(error, 'message', error)}")
        parsed += 1
    assert parsed > 40


def test_a_run_that_is_used_by_the_commands_is_a_real_one(run_dir: Path) -> None:
    assert sgd_spec(workers=1).name in (run_dir / "run.json").read_text()
    assert list((run_dir / "snapshots").glob("version-*.pt"))
