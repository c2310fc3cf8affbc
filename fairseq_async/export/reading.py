"""Reads the server's parameters, and the rest of the model, from a run or a checkpoint."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import GIVE_A_MODEL, ConfigurationError, first_line
from fairseq_async.protocol import Layout
from fairseq_async.records.snapshots import DIRECTORY, snapshots_in
from fairseq_async.records.state_files import load_checked
from fairseq_async.server.kept_state import FINAL, VERSION

_SERVER_STATE = "async_server.pt"  # in a checkpoint's directory of DeepSpeed or of the Trainer of transformers
_DEEPSPEED_MODEL = "mp_rank_00_model_states.pt"
_ZERO_3_MODEL = "zero_pp_rank_*_mp_rank_00_model_states.pt"
_FAIRSEQ_LAST = "checkpoint_last.pt"
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Source:
    """The model that was found in a run or checkpoint.

    Attributes:
        tensors: the whole model: the server's parameters, and the tensors of the checkpoint that are not trained.
        directory: the directory in which the configuration of the model may lie.
        fairseq: fairseq's checkpoint without its parameters; empty where there is none.
        whole: the names of the tensors of worker 0's own model, where that was saved beside the server's state.
        untrained: the names of those among ``tensors`` that the server does not have.
    """

    tensors: Tensors
    directory: Path
    fairseq: State = field(default_factory=dict)
    whole: Collection[str] = ()
    untrained: Collection[str] = ()


def read(source: Path) -> Source:
    """Reads the server's parameters, and the rest of the model, from a run or checkpoint.

    Raises:
        ConfigurationError: there are no parameters that can be read.
    """
    if source.is_file():
        return Source(load_tensors(source), source.parent) if source.name == FINAL else _read_file(source)
    if (source / FINAL).is_file():
        return _newest(load_tensors(source / FINAL), _final_version(source / FINAL), source)
    if snapshots := snapshots_in(source):
        return _read_snapshot(snapshots[::-1], source)
    for directory in (source, source / _latest_tag(source)):
        if (directory / _SERVER_STATE).is_file():
            found = _with_server_parameters(_load(directory / _SERVER_STATE), directory / _SERVER_STATE)
            # the Trainer of transformers writes the configuration beside DeepSpeed's directory of the tag
            beside = any((source / name).is_file() for name in ("config.json", "adapter_config.json"))
            return replace(found, directory=source) if beside else found
    if (source / _FAIRSEQ_LAST).is_file():
        return _read_file(source / _FAIRSEQ_LAST)
    if not source.exists():
        raise ConfigurationError(f"{source}: there is no such file or directory")
    raise ConfigurationError(
        f"{source}: there are no server's parameters in it: no {FINAL} of a finished run, no {DIRECTORY}/ of another, "
        f"no {_SERVER_STATE} and no {_FAIRSEQ_LAST}; give a checkpoint"
    )


def _latest_tag(directory: Path) -> str:
    """Returns the name of DeepSpeed's last checkpoint in a directory; empty without one."""
    path = directory / "latest"
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def _read_file(path: Path) -> Source:
    content = _load(path)
    if _is_fairseqs(content):
        rest = {key: value for key, value in content.items() if key not in ("model", "last_optimizer_state")}
        rest["extra_state"] = {k: v for k, v in (rest.get("extra_state") or {}).items() if k != "async_server"}
        return Source(dict(content["model"]), path.parent, rest)
    if isinstance(content, dict) and "server" in content:
        return _with_server_parameters(content, path)
    raise ConfigurationError(f"{path}: neither fairseq's checkpoint nor a server's state")


def _is_fairseqs(content: object) -> bool:
    if not (isinstance(content, dict) and "cfg" in content and isinstance(content.get("extra_state", {}), dict | None)):
        return False
    model = content.get("model")
    return isinstance(model, dict) and all(isinstance(each, Tensor) for each in model.values())


def _read_snapshot(paths: list[Path], run_dir: Path) -> Source:
    """Reads the newest snapshot that is readable, or fairseq's last checkpoint if that is as new; tensors that the
    snapshot lacks come from that checkpoint."""
    for path in paths:
        try:
            state = _load(path)
        except ConfigurationError:
            if path is paths[-1]:
                raise
            continue  # the file is torn, or the server has just replaced it by a newer one
        return _newest(_server_parameters(state, path), int(path.stem.partition("-")[2]), run_dir)
    raise AssertionError("there is at least one")


def _newest(parameters: Tensors, version: int, run_dir: Path) -> Source:
    """Returns the model of a run whose server had these parameters, or that of fairseq's last checkpoint if it is as
    new: a run goes on from it, too."""
    if not (run_dir / _FAIRSEQ_LAST).is_file():
        return Source(parameters, run_dir)
    base = _read_file(run_dir / _FAIRSEQ_LAST)
    if _server_version(_load(run_dir / _FAIRSEQ_LAST)) >= version:
        return base
    newest = _completed(parameters, base.tensors)
    kinds = {name: tensor.dtype for name, tensor in base.tensors.items()}  # of fairseq's model, maybe fp16
    return Source({name: value.to(kinds.get(name)) for name, value in newest.items()}, run_dir, base.fairseq)


def _final_version(path: Path) -> int:
    """Returns the version of a finished run's parameters; 0 where another program has written the file."""
    with safe_open(path, framework="pt") as file:
        return int((file.metadata() or {}).get(VERSION, 0))


def _server_version(checkpoint: State) -> int:
    """Returns the version of the server's state in fairseq's checkpoint; -1 where it has none."""
    held = (checkpoint.get("last_optimizer_state"), (checkpoint.get("extra_state") or {}).get("async_server"))
    states = [each["server"] for each in held if isinstance(each, dict) and isinstance(each.get("server"), dict)]
    return max((int(state.get("version", -1)) for state in states), default=-1)


def _with_server_parameters(state: State, path: Path) -> Source:
    whole, trained = _beside(path.parent), _server_parameters(state, path)
    tensors = _completed(trained, whole)  # the trained ones, maybe under other names, come first
    return Source(tensors, path.parent, whole=whole.keys(), untrained=list(tensors)[len(trained) :])


def _server_parameters(state: State, path: Path) -> Tensors:
    if "layout" not in state:
        raise ConfigurationError(
            f"{path}: written by an older version, without the names of the tensors: resume it once"
        )
    try:
        layout, flat = Layout.from_json(state["layout"]), state["server"]["parameters"]
        return {segment.name: view for segment, view in zip(layout.segments, layout.views(flat), strict=True)}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{path}: not a server's state: {error}") from error


def _beside(directory: Path) -> Tensors:
    """Reads the worker's whole model from a checkpoint's directory; it includes the tensors that the server does not
    have."""
    if (directory / "model.safetensors").is_file():
        return load_tensors(directory / "model.safetensors")
    if (directory / _DEEPSPEED_MODEL).is_file():
        return dict(_load(directory / _DEEPSPEED_MODEL)["module"])
    ranks = [path for path in directory.glob(_ZERO_3_MODEL) if path.name.split("_")[3].isdigit()]
    if ranks:
        return _of_zero_3([_load(path) for path in sorted(ranks, key=lambda path: int(path.name.split("_")[3]))])
    return {}


def _of_zero_3(ranks: list[State]) -> Tensors:
    """Reads from ZeRO 3 the buffers, which are whole, and the frozen parameters, of which each rank has a part; not
    the trained parameters.

    Two names of one trained parameter get one tensor without its values.
    """
    first = ranks[0]
    whole = {name: first["module"][name] for name in first["buffer_names"]}
    for name, shape in (first["frozen_param_shapes"] or {}).items():
        parts = torch.cat([rank["frozen_param_fragments"][name] for rank in ranks])
        whole[name] = parts[: shape.numel()].view(shape)  # the last part is padded
    for name, other in (first["shared_params"] or {}).items():
        whole[name] = whole.setdefault(other, torch.empty(1))
    return whole


def _completed(trained: Tensors, whole: Tensors) -> Tensors:
    """Returns the trained parameters, and the other tensors of the whole model, whose names count: a wrapper may have
    changed those of the trained ones."""
    if names := fitted(trained, whole):
        trained = {names[name]: tensor for name, tensor in trained.items()}
    return trained | {name: _tied(tensor, trained, whole) for name, tensor in whole.items() if name not in trained}


def _tied(tensor: Tensor, trained: Tensors, whole: Tensors) -> Tensor:
    """Returns the present value of a tensor that is not trained under its own name: the trained value of another name,
    if both names were one tensor, else the tensor itself.

    Files do not always keep that two names were one tensor: two matrices that are bitwise equal are taken to be one.
    """
    for name, value in trained.items():
        before = whole.get(name)
        if before is None or before.shape != tensor.shape:
            continue
        same = before.data_ptr() == tensor.data_ptr() and before.dtype == tensor.dtype
        if same or (tensor.dim() > 1 and torch.equal(before, tensor)):
            return value
    return tensor


def load_tensors(path: Path) -> Tensors:
    """Reads a file of tensors.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error


def _load(path: Path) -> Any:
    if not is_zipfile(path):
        raise ConfigurationError(f"{path}: not a file that torch.save has written; {GIVE_A_MODEL}")
    try:
        return load_checked(path, mmap=True)
    except Exception as error:  # as where the bytes are broken
        raise ConfigurationError(f"{path}: cannot be read: {first_line(error)}") from error


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Writes a file of tensors, as transformers reads it."""
    own = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}  # it refuses shared memory
    save_file(own, path, metadata={"format": "pt"})


_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile, and of recomputed activations


def unwrapped(name: str) -> str:
    """Returns the name without the parts that stand for no module of the model's own."""
    return ".".join(part for part in name.split(".") if part not in _TRANSPARENT)


def fitted(names: Collection[str], known: Collection[str]) -> dict[str, str] | None:
    """Returns which of a model's ``known`` names each of these is, if an outer module has put the same before all of
    them, or lacks the same; None where they differ in another way."""
    plain = {name: unwrapped(name) for name in names}
    first = min(plain.values(), default="")
    for each in known:
        if first == each or first.endswith(f".{each}"):
            before, after = first[: len(first) - len(each)], ""
        elif each.endswith(f".{first}"):
            before, after = "", each[: len(each) - len(first)]
        else:
            continue
        if all(name.startswith(before) and after + name[len(before) :] in known for name in plain.values()):
            return {name: after + short[len(before) :] for name, short in plain.items()}
    return None
