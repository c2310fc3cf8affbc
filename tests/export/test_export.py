"""``fairseq-async export``: what others read is what the server had, to the bit."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from fairseq_async.cli.program import app
from fairseq_async.errors import ConfigurationError
from fairseq_async.export import Format, export
from fairseq_async.export.reading import fitted
from fairseq_async.protocol import Layout
from fairseq_async.server.kept_state import write_final

VALUES = torch.arange(6.0) / 7
NAMED = [("head.weight", torch.zeros(2, 2)), ("head.bias", torch.zeros(2))]
MEAN = torch.arange(6.0).view(2, 3).t()  # a buffer whose elements are not in order in memory
TRAINED = {"head.weight": VALUES[:4].view(2, 2), "head.bias": VALUES[4:]}


def state(**changes: Any) -> dict[str, Any]:
    """A server's, as its snapshots and checkpoints have it."""
    layout = Layout.of(NAMED).to_json()
    return {"method": "local_sgd", "layout": layout, "server": {"version": 3, "parameters": VALUES.clone()}} | changes


def run_with_snapshots(folder: Path) -> Path:
    """The newest is torn."""
    (folder / "snapshots").mkdir(parents=True)
    torch.save(state() | {"server": {"parameters": torch.zeros(6)}}, folder / "snapshots" / "version-000000000001.pt")
    torch.save(state(), folder / "snapshots" / "version-000000000002.pt")
    (folder / "snapshots" / "version-000000000003.pt").write_bytes(b"torn")
    return folder


def deepspeed_checkpoint(folder: Path) -> Path:
    """Its model is worker 0's: the trained parameters in it are others, and ``tied`` is the head's weight. That two
    biases are equal says nothing."""
    local = torch.full((2, 2), 9.0)
    module = {"head.weight": local, "head.bias": torch.ones(2), "tied": local, "mean": MEAN}
    module["frozen.bias"] = torch.ones(2)
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    torch.save({"module": module}, tag / "mp_rank_00_model_states.pt")
    torch.save(state(), tag / "async_server.pt")
    (folder / "latest").write_text("global_step3\n")
    return folder


def fairseq_checkpoint(folder: Path) -> Path:
    """Of a model in half precision whose two names of one matrix the file has as two."""
    folder.mkdir(parents=True, exist_ok=True)
    model = {
        "head.weight": torch.full((2, 2), 9.0).half(),
        "head.bias": torch.ones(2).half(),
        "out.weight": torch.full((2, 2), 9.0).half(),
        "version": torch.tensor([3.0]).half(),
    }
    rest = {"cfg": {"task": {"_name": "t"}}, "extra_state": {"epoch": 2, "async_server": {"big": 1}}}
    torch.save({"model": model, "last_optimizer_state": {"server": 1}, **rest}, folder / "checkpoint_last.pt")
    return folder / "checkpoint_last.pt"


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_newest_snapshot_that_can_be_read_is_exported(tmp_path: Path) -> None:
    run = run_with_snapshots(tmp_path / "run")
    assert export(run, tmp_path / "out.safetensors") is Format.SAFETENSORS
    assert export(run, tmp_path / "out.pt") is Format.STATE_DICT
    assert [export(run, tmp_path / name) for name in ("out.pth", "out.bin")] == [Format.STATE_DICT] * 2
    assert equal(load_file(tmp_path / "out.safetensors"), TRAINED)
    assert equal(torch.load(tmp_path / "out.pt", weights_only=True), TRAINED)
    model = nn.ModuleDict({"head": nn.Linear(2, 2)})
    model.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))
    assert len(list((run / "snapshots").iterdir())) == 3  # it only reads


@pytest.mark.parametrize("where", ["", "global_step3", "global_step3/async_server.pt"])
def test_a_deepspeed_checkpoint_gives_the_servers_parameters_and_worker_0s_buffers(tmp_path: Path, where: str) -> None:
    checkpoint = deepspeed_checkpoint(tmp_path / "checkpoint")
    export(checkpoint / where, tmp_path / "out.safetensors")
    expected = TRAINED | {"tied": TRAINED["head.weight"], "mean": MEAN, "frozen.bias": torch.ones(2)}
    assert equal(load_file(tmp_path / "out.safetensors"), expected)


def test_a_checkpoint_of_zero_3_gives_buffers_frozen_and_tied_parameters_too(tmp_path: Path) -> None:
    """As DeepSpeed writes it on eleven ranks, each with its part of what is frozen; the last part is padded."""
    torch.save(state(), tmp_path / "async_server.pt")
    for rank, part in enumerate(torch.arange(22.0).split(2)):
        content: dict[str, Any] = {"module": {"mean": MEAN, "head.weight": torch.empty(0)}}
        content |= {"buffer_names": ["mean"], "shared_params": {"tied": "head.weight"}}
        content |= {"frozen_param_shapes": {"stem": torch.Size([21])}, "frozen_param_fragments": {"stem": part.clone()}}
        torch.save(content, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    export(tmp_path, tmp_path / "out.safetensors")
    expected = {"tied": TRAINED["head.weight"], "mean": MEAN, "stem": torch.arange(21.0)}
    assert equal(load_file(tmp_path / "out.safetensors"), TRAINED | expected)


def test_a_checkpoint_of_zero_3_may_have_nothing_frozen_and_nothing_tied(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "async_server.pt")
    content = {"module": {"mean": MEAN}, "buffer_names": ["mean"], "shared_params": None, "frozen_param_shapes": None}
    torch.save(content, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    export(tmp_path, tmp_path / "out.safetensors")
    assert equal(load_file(tmp_path / "out.safetensors"), TRAINED | {"mean": MEAN})


@pytest.mark.parametrize(
    ("names", "known", "found"),
    [
        (["outer.net.w", "outer.net.b"], ["net.w", "net.b"], ["net.w", "net.b"]),
        (["net.w"], ["outer.net.w"], ["outer.net.w"]),
        (["_orig_mod.net.w"], ["net.w"], ["net.w"]),
        (["net._checkpoint_wrapped_module.w"], ["net.w"], ["net.w"]),
        (["net.w"], ["net.w"], ["net.w"]),
        (["subnet.w"], ["net.w"], None),
        (["net.w"], ["subnet.w"], None),
        (["outer.net.w", "other.net.b"], ["net.w", "net.b"], None),
    ],
)
def test_names_fit_where_whole_modules_come_before_them(
    names: list[str], known: list[str], found: list[str] | None
) -> None:
    assert fitted(names, known) == (None if found is None else dict(zip(names, found, strict=True)))


def test_an_hf_directory_has_configuration_and_tokenizer_beside_the_parameters(tmp_path: Path) -> None:
    """As the Trainer of transformers leaves them in a checkpoint, or from another directory."""
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    save_file({name: torch.zeros_like(value) for name, value in TRAINED.items()}, checkpoint / "model.safetensors")
    torch.save(state(), checkpoint / "async_server.pt")
    given = {"config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"}
    for name in (*given, "trainer_state.json", "run.json", "model.safetensors.index.json"):
        (checkpoint / name).write_text("{}")
    assert export(checkpoint, tmp_path / "model") is Format.HF
    assert {path.name for path in (tmp_path / "model").iterdir()} == given | {"model.safetensors"}
    assert equal(load_file(tmp_path / "model" / "model.safetensors"), TRAINED)
    tagged = deepspeed_checkpoint(tmp_path / "checkpoint-4")  # of a Trainer with DeepSpeed
    (tagged / "config.json").write_text("{}")
    assert export(tagged, tmp_path / "tagged") is Format.HF
    assert (tmp_path / "tagged" / "config.json").exists()
    run = run_with_snapshots(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="there is no config.json.*give --config"):
        export(run, tmp_path / "other")
    export(run, tmp_path / "other", config=checkpoint)
    assert (tmp_path / "other" / "config.json").exists()


def test_a_fairseq_checkpoint_loses_its_optimizer_state_and_takes_a_newer_snapshot(tmp_path: Path) -> None:
    path = fairseq_checkpoint(tmp_path / "save")
    assert export(path, tmp_path / "same.pt") is Format.FAIRSEQ
    same = torch.load(tmp_path / "same.pt", weights_only=True)
    assert same["model"]["head.bias"].tolist() == [1.0, 1.0]
    assert "last_optimizer_state" not in same and same["extra_state"] == {"epoch": 2} and "cfg" in same
    export(run_with_snapshots(tmp_path / "save"), tmp_path / "newer.pt")
    newer = torch.load(tmp_path / "newer.pt", weights_only=True)["model"]
    half = {name: value.half() for name, value in TRAINED.items()}
    assert equal(newer, half | {"out.weight": half["head.weight"], "version": torch.tensor([3.0]).half()})
    content = torch.load(path, weights_only=True)
    content["extra_state"]["async_server"] = {"server": {"version": 2}}  # the snapshot's
    torch.save(content, path)
    export(tmp_path / "save", tmp_path / "as new.pt")
    assert equal(torch.load(tmp_path / "as new.pt", weights_only=True)["model"], same["model"])
    torch.save(content | {"extra_state": None}, path)
    export(tmp_path / "save", tmp_path / "bare.pt")
    bare = torch.load(tmp_path / "bare.pt", weights_only=True)
    assert equal(bare["model"], newer) and bare["extra_state"] == {}


def test_a_finished_runs_file_is_exported_and_nothing_else(tmp_path: Path) -> None:
    """Its snapshots are removed, or older where the disk was full; the file is what a server has written."""
    run = run_with_snapshots(tmp_path / "run")
    write_final(run, Layout.of(NAMED), VALUES + 1, 9)
    expected = {name: value + 1 for name, value in TRAINED.items()}
    for source in (run, run / "final.safetensors"):
        export(source, tmp_path / f"{source.name}.pt")
        assert equal(torch.load(tmp_path / f"{source.name}.pt", weights_only=True), expected)
    (run / "final.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigurationError, match="final.safetensors: cannot be read"):
        export(run, tmp_path / "other.pt")


@pytest.mark.parametrize("where", ["hybrid", "local_sgd"])
def test_a_fairseq_checkpoint_that_is_newer_than_the_snapshots_is_exported(tmp_path: Path, where: str) -> None:
    """The launcher was killed after the checkpoint, or the run goes on."""
    run = run_with_snapshots(tmp_path / "save")
    content = torch.load(fairseq_checkpoint(run), weights_only=True)
    content["last_optimizer_state"] = state() if where == "hybrid" else None
    content["extra_state"] = {"async_server": state() if where == "local_sgd" else None}
    torch.save(content, run / "checkpoint_last.pt")
    export(run, tmp_path / "out.pt")
    assert equal(torch.load(tmp_path / "out.pt", weights_only=True)["model"], content["model"])


@pytest.mark.parametrize(("version", "newer"), [(8, False), (9, True), (10, True)])
def test_of_a_finished_runs_file_and_fairseqs_checkpoint_the_newer_is_exported(
    tmp_path: Path, version: int, newer: bool
) -> None:
    """Of an equal version the checkpoint, which has the rest of the model."""
    run = run_with_snapshots(tmp_path / "save")
    write_final(run, Layout.of(NAMED), VALUES + 1, 9)
    content = torch.load(fairseq_checkpoint(run), weights_only=True)
    content["last_optimizer_state"] = state(server={"version": 7, "parameters": VALUES})
    content["extra_state"]["async_server"] = state(server={"version": version, "parameters": VALUES})
    torch.save(content, run / "checkpoint_last.pt")
    export(run, tmp_path / "out.pt")
    half = {name: (value + 1).half() for name, value in TRAINED.items()}
    rest = {"out.weight": half["head.weight"], "version": content["model"]["version"]}
    assert equal(
        torch.load(tmp_path / "out.pt", weights_only=True)["model"], content["model"] if newer else half | rest
    )


@pytest.mark.parametrize(("server", "newer"), [({}, False), ({"version": 0}, True)])
def test_a_runs_file_of_another_program_has_no_version(tmp_path: Path, server: dict[str, int], newer: bool) -> None:
    """It is newer than a checkpoint without a server, and older than one with."""
    save_file(TRAINED, tmp_path / "final.safetensors")
    content = torch.load(fairseq_checkpoint(tmp_path), weights_only=True)
    torch.save(content | {"last_optimizer_state": {"server": server or 1}}, tmp_path / "checkpoint_last.pt")
    export(tmp_path, tmp_path / "out.pt")
    bias = torch.load(tmp_path / "out.pt", weights_only=True)["model"]["head.bias"]
    assert torch.equal(bias, torch.ones(2).half() if newer else TRAINED["head.bias"].half())


def broken(folder: Path) -> Path:
    (folder / "file.pt").write_bytes(b"nothing")
    return folder / "file.pt"


def another(folder: Path) -> Path:
    torch.save({"weights": 1}, folder / "file.pt")
    return folder / "file.pt"


def modelless(folder: Path) -> Path:
    torch.save({"model": 3, "cfg": {}}, folder / "file.pt")
    return folder / "file.pt"


def unnamed(folder: Path) -> Path:
    torch.save({"server": {"parameters": VALUES}}, folder / "file.pt")
    return folder / "file.pt"


def short(folder: Path) -> Path:
    torch.save(state(server={"parameters": VALUES[:3]}), folder / "file.pt")
    return folder / "file.pt"


def other_tensors(folder: Path) -> Path:
    save_file(TRAINED, folder / "model.safetensors")
    return folder / "model.safetensors"


def without_a_model(folder: Path) -> Path:
    torch.save({"model": [1], "cfg": {}, "extra_state": 3}, folder / "file.pt")
    return folder / "file.pt"


def code(folder: Path) -> Path:
    """What only a pickle that runs code could load."""
    torch.save(Path, folder / "file.pt")
    return folder / "file.pt"


WRONG: dict[str, tuple[Callable[[Path], Path], list[str], str]] = {
    "nothing there": (lambda folder: folder / "none", [], "none: No such file"),
    "an empty directory": (lambda folder: folder, [], "there are no server's parameters in it"),
    "no checkpoint": (broken, [], "file.pt: not a file that torch.save has written; give the directory"),
    "tensors of no run": (other_tensors, [], "model.safetensors: not a file that torch.save has written"),
    "a model that is none": (modelless, [], "neither fairseq's checkpoint nor a server's state"),
    "another file": (another, [], "neither fairseq's checkpoint nor a server's state"),
    "a checkpoint of something else": (without_a_model, [], "neither fairseq's checkpoint nor"),
    "an old state": (unnamed, [], "without the names of the tensors"),
    "a state that is cut": (short, [], "not a server's state"),
    "a pickle": (code, [], "cannot be read: Weights only load failed"),
    "a format that there is not": (run_with_snapshots, ["--format", "onnx"], "--format onnx: one of hf, safetensors"),
    "fairseq of a run without": (run_with_snapshots, ["--format", "fairseq"], "--format fairseq needs"),
}


@pytest.mark.parametrize(("make", "flags", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path: Path, make: Any, flags: list[str], said: str) -> None:
    (tmp_path / "in").mkdir()
    result = CliRunner().invoke(app, ["export", str(make(tmp_path / "in")), str(tmp_path / "out.pt"), *flags])
    assert isinstance(result.exception, ConfigurationError) and said in str(result.exception)
    assert "\n" not in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    run = run_with_snapshots(tmp_path / "run")
    (tmp_path / "out.pt").write_text("precious")
    with pytest.raises(ConfigurationError, match="exists already"):
        export(run, tmp_path / "out.pt")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        export(run, tmp_path / "missing" / "out.pt")
    with pytest.raises(ConfigurationError, match="cannot be written: .*too long"):
        export(run, tmp_path / f"{'n' * 256}.pt")
    assert (tmp_path / "out.pt").read_text() == "precious"


def test_what_an_export_that_was_killed_has_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(TRAINED, tmp_path / "model.safetensors")
    (tmp_path / ".model.part").mkdir()
    (tmp_path / ".model.part" / "tokenizer.json").write_text("cut")
    export(run_with_snapshots(tmp_path / "run"), tmp_path / "model", config=tmp_path)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}
    assert not (tmp_path / ".model.part").exists()


def test_a_file_system_that_is_read_only_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses to remove a file that is not there, too."""
    run = run_with_snapshots(tmp_path / "run")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ConfigurationError, match="out.pt cannot be written: .*Read-only file system"):
        export(run, tmp_path / "out.pt")


def test_nothing_is_left_of_a_file_for_which_the_disk_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_snapshots(tmp_path / "run")

    def fill(_: object, path: Path) -> None:
        path.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", fill)
    with pytest.raises(ConfigurationError, match="out.pt cannot be written: the disk is full; make room in "):
        export(run, tmp_path / "out.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_command_says_what_it_has_written(tmp_path: Path) -> None:
    run = run_with_snapshots(tmp_path / "run")
    result = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out.safetensors")])
    assert result.exit_code == 0 and "as safetensors" in result.output
    assert equal(load_file(tmp_path / "out.safetensors"), TRAINED)
