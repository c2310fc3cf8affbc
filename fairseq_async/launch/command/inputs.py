"""Checks the inputs of ``fairseq-train`` before a process is started, without importing fairseq."""

import importlib.util
import os
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from fairseq_async.errors import ConfigurationError
from fairseq_async.method.option_flags import INNER_OPTIMIZER, OneLineParser, check_inner_optimizer

_PREPROCESS = "make it with fairseq-preprocess, and give its --destdir"
_LAST = "checkpoint_last.pt"  # fairseq's default of --restore-file: the one in --save-dir
_TEXT_TASKS = ("translation", "language_modeling")
_WITHOUT_VALID_SUBSETS = ("--disable-validation", "--combine-valid-subsets", "--combine-val")


def check_inputs(method: str, arguments: Sequence[str]) -> None:
    """Checks the inner optimizer, the user directory, the checkpoint to restore, and the data with its dictionaries.

    Checks only what is certain: tasks other than translation and language modelling may have other files.

    Args:
        arguments: the arguments of ``fairseq-train``.

    Raises:
        ConfigurationError: fairseq would not find one of them.
    """
    given = _parser().parse_known_args(list(arguments))[0]
    registered = _registered_optimizers()
    if given.user_dir is None and registered:  # a user's own directory may register further optimizers
        check_inner_optimizer(method, given.inner_optimizer, registered)
    if given.user_dir is not None and not os.path.exists(given.user_dir):
        raise ConfigurationError(f"--user-dir {given.user_dir}: no such directory")
    _check_restore_file(given)
    _check_model(given)
    if arguments and not arguments[0].startswith("-"):
        paths = [Path(path) for path in arguments[0].split(os.pathsep)]
        for path in paths:
            _check_directory(path)
        # of several directories, fairseq reads dictionaries and validation sets in the first only
        _check_dictionaries(paths[0], given)
        for path in paths:
            _check_training_set(path, given)
        _check_validation(paths[0], given)


def _parser() -> OneLineParser:
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--user-dir")
    parser.add_argument("--restore-file", default=_LAST)
    parser.add_argument("--finetune-from-model")
    parser.add_argument("--continue-once")
    parser.add_argument("--save-dir", default="checkpoints")  # fairseq's defaults, as those below
    parser.add_argument("--checkpoint-suffix", default="")
    parser.add_argument("--task", default="translation")
    parser.add_argument("-s", "--source-lang")
    parser.add_argument("-t", "--target-lang")
    parser.add_argument("--train-subset", default="train")
    parser.add_argument("--valid-subset", default="valid")
    for flag in _WITHOUT_VALID_SUBSETS:
        parser.add_argument(flag, dest="without_valid_subsets", action="store_true")
    parser.add_argument(INNER_OPTIMIZER.flag, default=INNER_OPTIMIZER.default)
    return parser


def _registered_optimizers() -> set[str]:
    """Returns the names of fairseq's optimizers, read from its source files: importing fairseq takes seconds."""
    spec = importlib.util.find_spec("fairseq")
    folders = [Path(folder) / "optim" for folder in (spec.submodule_search_locations if spec else None) or []]
    texts = [path.read_text(errors="replace") for folder in folders for path in folder.glob("*.py")]
    return {name for text in texts for name in re.findall(r'@register_optimizer\(\s*"(\w+)"', text)}


def _check_restore_file(given: Namespace) -> None:
    """Checks that a checkpoint of another run is there: without it, fairseq would train from the beginning, over what
    is in --save-dir. One in --save-dir may be this run's own, which its first start does not find."""
    path = Path(given.restore_file.replace(".pt", given.checkpoint_suffix + ".pt"))
    own = given.restore_file == _LAST or path.resolve().parent == Path(given.save_dir).resolve()
    if not (own or "://" in given.restore_file or path.exists()):
        raise ConfigurationError(f"--restore-file {given.restore_file}: no such file")


def _check_model(given: Namespace) -> None:
    """Checks that a model to fine-tune is there; fairseq looks for it only if --save-dir has no checkpoint to go on
    from."""
    model, last = given.finetune_from_model, _LAST.replace(".pt", given.checkpoint_suffix + ".pt")
    if model is None or given.continue_once is not None or Path(given.save_dir, last).exists():
        return
    if not ("://" in model or Path(model).exists()):
        raise ConfigurationError(f"--finetune-from-model {model}: no such file")


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise ConfigurationError(f"{path}: no such directory of data; {_PREPROCESS}")


def _check_dictionaries(path: Path, given: Namespace) -> None:
    if given.task == "translation":
        for language in _languages(path, given):
            _find(path, f"dict.{language}.txt", "dictionary")
    elif given.task == "language_modeling":
        _find(path, "dict.txt", "dictionary")


def _check_training_set(path: Path, given: Namespace) -> None:
    subset = given.train_subset
    if given.task in _TEXT_TASKS and not any(path.glob(f"{subset}.*")):
        raise ConfigurationError(f"{path}: no training set there ({subset}.*); {_PREPROCESS}")


def _check_validation(path: Path, given: Namespace) -> None:
    if given.task not in _TEXT_TASKS or given.without_valid_subsets:
        return
    for subset in given.valid_subset.split(","):
        if not any(path.glob(f"{subset}.*")):
            raise ConfigurationError(
                f"{path}: no validation set there ({subset}.*); {_PREPROCESS}, name another with --valid-subset, or "
                "give --disable-validation"
            )


def _languages(path: Path, given: Namespace) -> list[str]:
    """Returns source and target language, as given or, like fairseq, from the name of the first file that has both."""
    if given.source_lang and given.target_lang:
        return [given.source_lang, given.target_lang]
    pairs = [re.match(r"[^.]+\.([^.-]+)-([^.-]+)\.", each.name) for each in sorted(path.iterdir())]
    found = next((pair for pair in pairs if pair), None)
    if found is None:
        raise ConfigurationError(f"{path}: no training set of two languages there (train.SRC-TGT.*); {_PREPROCESS}")
    return list(found.groups())


def _find(path: Path, name: str, what: str) -> None:
    if not (path / name).is_file():
        raise ConfigurationError(f"{path}: no {what} there ({name}); {_PREPROCESS}")
