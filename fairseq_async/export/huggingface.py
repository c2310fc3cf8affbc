"""Directories for ``from_pretrained``: a whole model, or an adapter of PEFT, or an adapter merged into its base."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from fairseq_async.errors import ConfigurationError, first_line
from fairseq_async.export.reading import Source, Tensors, fitted, load_tensors, save_tensors, unwrapped
from fairseq_async.pytorch.trainer.torchaudio import hide_broken_torchaudio

_WEIGHTS, _ADAPTER, _ADAPTER_CONFIG = "model.safetensors", "adapter_model.safetensors", "adapter_config.json"
_OF_A_MODEL = ("*.json", "*.txt", "*.model", "*.jinja")  # files of configuration and tokenizer
_OF_TRAINING = ("trainer_state.json", "run.json", "zero_to_fp32.py", f"{_WEIGHTS}.index.json")
_OTHERWISE = "or give --format safetensors"
_OF_PEFT, _PREFIX = "base_model.", "base_model.model."
# what PEFT calls the parts of an adapter, and the adapter's own name
_PART = re.compile(r"\.(lora_\w+|ia3_l|modules_to_save)\.(?P<adapter>[^.]+)")
_CLASSES = {  # by PEFT's name of the task
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}


def write_hf(found: Source, directory: Path, config: Path | None, base: Path | None) -> None:
    """Writes the parameters and the configuration, and the tokenizer if it is there.

    Raises:
        ConfigurationError: ``from_pretrained`` would not find in it what the configuration describes.
    """
    given = found.directory if config is None else config
    if any(_PART.search(name) or _OF_PEFT in name for name in found.tensors):
        return _write_adapter(found, directory, given, base)
    if base is not None:
        raise ConfigurationError(f"--base {base}: there is no adapter in {found.directory} to be merged into it")
    if not (given / "config.json").is_file():
        raise ConfigurationError(
            f"{given}: there is no config.json, which an HF directory needs: give --config with the directory of the "
            f"model, {_OTHERWISE}"
        )
    tensors = _checked(found, given)
    _copy(given, directory)
    save_tensors(tensors, directory / _WEIGHTS)


def _copy(given: Path, directory: Path, without: tuple[str, ...] = ()) -> None:
    directory.mkdir(exist_ok=True)
    for pattern in _OF_A_MODEL:
        for path in given.glob(pattern):
            if path.is_file() and path.name not in (*_OF_TRAINING, *without):
                shutil.copy(path, directory)


# Whole models


@dataclass(frozen=True)
class Described:
    """The model that a directory describes.

    Attributes:
        what: its name, for errors.
        shapes: of its tensors, by name.
        same: of each name, all names of the same tensor.
    """

    what: str
    shapes: dict[str, list[int]]
    same: dict[str, set[str]]


def _checked(found: Source, given: Path) -> Tensors:
    """Returns the tensors under the names of the model that the configuration describes.

    Raises:
        ConfigurationError: they are not those of this model, or there is nothing to compare them with.
    """
    model = _of_configuration(given) or _of_weights(given) or _of_checkpoint(found)
    if model is None:
        raise ConfigurationError(
            f"{given}: its config.json is of no model that transformers knows here, and there is no {_WEIGHTS} beside "
            "it to compare names with: give --config with the directory of the model as it was loaded, or "
            "--format safetensors"
        )
    names = fitted(found.tensors, model.shapes)
    if names is None:
        odd = min((name for name in found.tensors if name not in model.shapes), default="the tensors")
        raise ConfigurationError(
            f"{odd} is not in {model.what}: give --config with the configuration of the model that was trained, "
            f"{_OTHERWISE}"
        )
    tensors = {names[name]: tensor for name, tensor in found.tensors.items()}
    for name, shape in model.shapes.items():
        if not model.same[name] & tensors.keys():
            raise ConfigurationError(
                f"{name} of {model.what} is not among the tensors of {found.directory}, and from_pretrained would "
                "initialise it at random: what is not trained is in a checkpoint and not in a run's own files; give "
                f"a checkpoint, or --config with what was trained, {_OTHERWISE}"
            )
        if name in tensors and list(tensors[name].shape) != shape:
            raise ConfigurationError(
                f"{name} is {'x'.join(map(str, tensors[name].shape))}, and {'x'.join(map(str, shape))} in "
                f"{model.what}: give --config with the configuration of the model that was trained, {_OTHERWISE}"
            )
    return tensors


def _of_configuration(directory: Path) -> Described | None:
    """Makes the model of a configuration without its values; None where transformers does not know it."""
    try:
        if "model_type" not in json.loads((directory / "config.json").read_text()):
            return None  # before an import that takes seconds
        hide_broken_torchaudio()
        import transformers  # not in every environment

        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        name = (config.architectures or ["AutoModel"])[0]
        kind: Any = getattr(transformers, name)
        with torch.device("meta"):
            model = kind.from_config(config) if name == "AutoModel" else kind(config)
        model.tie_weights()
    except Exception:  # of any kind: a class of the user's own, no transformers, or one that this torch cannot load
        return None
    state = model.state_dict(keep_vars=True)
    names: dict[int, set[str]] = {}
    for each, tensor in state.items():
        names.setdefault(id(tensor), set()).add(each)
    shapes = {each: list(tensor.shape) for each, tensor in state.items()}
    return Described(f"{name} ({directory / 'config.json'})", shapes, {k: names[id(v)] for k, v in state.items()})


def _of_weights(directory: Path) -> Described | None:
    path = directory / _WEIGHTS
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}
    return Described(str(path), shapes, {name: {name} for name in shapes})


def _of_checkpoint(found: Source) -> Described | None:
    """The model as worker 0 has saved it, which has names of a model that only the script knows."""
    if not found.whole:
        return None
    shapes = {name: list(found.tensors[name].shape) for name in found.whole if name in found.tensors}
    return Described(f"the model in {found.directory}", shapes, {name: {name} for name in shapes})


# Adapters


def _write_adapter(found: Source, directory: Path, given: Path, base: Path | None) -> None:
    if not (given / _ADAPTER_CONFIG).is_file():
        raise ConfigurationError(
            f"{given}: there is no {_ADAPTER_CONFIG}, and the tensors are an adapter's: give --config with the "
            f"directory in which it is (peft_config[...].save_pretrained(DIR) writes it), {_OTHERWISE}"
        )
    tensors = _adapter(found)
    if base is None:
        _copy(given, directory, without=("config.json",))  # an adapter's directory is no model's
        return save_tensors(tensors, directory / _ADAPTER)
    _copy(base, directory)
    adapter = directory / "adapter"
    adapter.mkdir()
    shutil.copy(given / _ADAPTER_CONFIG, adapter)
    save_tensors(tensors, adapter / _ADAPTER)
    _merge(adapter, base, tensors, directory)
    shutil.rmtree(adapter)


def _adapter(found: Source) -> Tensors:
    """Returns an adapter's tensors under the names that PEFT gives them in a file.

    Raises:
        ConfigurationError: there are several adapters, parts are missing, or PEFT has another form of file for them.
    """
    names = {name: _PART.search(unwrapped(name)) for name in found.tensors}
    names = {name: part for name, part in names.items() if part is not None or name not in found.untrained}
    adapters = {part["adapter"] for part in names.values() if part is not None}
    odd = min((name for name, part in names.items() if part is None), default=None)
    if odd is not None or len(adapters) != 1:
        why = f"{odd} is of no LoRA or IA3" if odd is not None else f"there are the adapters {', '.join(adapters)}"
        raise ConfigurationError(f"{found.directory}: {why}: let worker 0 call save_pretrained, {_OTHERWISE}")
    tensors = {_in_file(name): found.tensors[name] for name in names}
    saved = found.directory / _ADAPTER
    if saved.is_file():
        whole = load_tensors(saved)
        if others := tensors.keys() - whole.keys():
            raise ConfigurationError(f"{min(others)} is not in {saved}, which is of another adapter; {_OTHERWISE}")
        tensors = whole | tensors  # what of the adapter is frozen
    for name in tensors:
        for one, other in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            for partner in (name.replace(one, other), name.replace(other, one)):
                if partner not in tensors:
                    raise ConfigurationError(
                        f"{partner}, to which {name} belongs, is not among the tensors of {found.directory}: what is "
                        f"not trained is in a checkpoint; give one, {_OTHERWISE}"
                    )
    return tensors


def _in_file(name: str) -> str:
    plain = unwrapped(name)
    own = _PREFIX + plain.rpartition(_PREFIX)[2]
    part = _PART.search(own)
    assert part is not None
    kind = "" if part[1] == "modules_to_save" else f".{part[1]}"
    short = own[: part.start()] + kind + own[part.end() :]
    return short.removesuffix(".weight") if part[1] == "lora_magnitude_vector" else short


def _merge(adapter: Path, base: Path, tensors: Tensors, out: Path) -> None:
    """Merges an adapter into its base model, as PEFT does."""
    try:
        hide_broken_torchaudio()
        import transformers  # not in every environment
        from peft import PeftModel
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"--base: PEFT merges, and it is not here ({first_line(error)}): pip install peft, or leave --base out"
        ) from error
    task = json.loads((adapter / _ADAPTER_CONFIG).read_text()).get("task_type")
    config = transformers.AutoConfig.from_pretrained(base, local_files_only=True)
    kind: Any = getattr(transformers, _CLASSES.get(task) or (config.architectures or ["AutoModel"])[0])
    try:
        model, info = kind.from_pretrained(base, dtype=torch.float32, local_files_only=True, output_loading_info=True)
        if missing := {name for name in info["missing_keys"] if _PREFIX + name not in tensors}:
            raise ConfigurationError(f"--base {base}: {min(missing)} is neither there nor in the adapter")
        PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(out)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--base {base}: {first_line(error)}") from error
