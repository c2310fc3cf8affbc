"""Writes what :mod:`fairseq_async.export.reading` has read, in one of several formats."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

import torch
from safetensors import SafetensorError

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import ConfigurationError, why_not_written
from fairseq_async.export.huggingface import write_hf
from fairseq_async.export.reading import Source, read, save_tensors


class Format(str, Enum):
    """The format of the exported file or directory."""

    HF = "hf"
    SAFETENSORS = "safetensors"
    FAIRSEQ = "fairseq"
    STATE_DICT = "state_dict"


def export(
    source: Path, out: Path, format: Format | None = None, config: Path | None = None, base: Path | None = None
) -> Format:
    """Exports the model in ``source`` to ``out``; returns the format, which is chosen by ``out`` if none is given.

    Args:
        source: a run's directory, a checkpoint's directory of DeepSpeed or of transformers, fairseq's checkpoint, or a
            file with a server's state.
        config: a directory with the ``config.json`` that an HF directory needs, or with an adapter's configuration.
        base: directory of the model into which an adapter is merged.

    Raises:
        ConfigurationError: ``source`` has no server's parameters, or ``out`` exists or cannot be written.
    """
    try:
        taken = out.exists()
    except OSError as error:  # such as a name that is too long
        raise ConfigurationError(f"{out} cannot be written: {error}") from error
    if taken:
        raise ConfigurationError(f"{out} exists already: give another OUT")
    found = read(source)
    chosen = format or _default_format(out, found)
    if base is not None and chosen is not Format.HF:
        raise ConfigurationError(f"--base: is for --format hf, and {out} is to be {chosen.value}")
    with _written(out) as part:
        match chosen:
            case Format.HF:
                write_hf(found, part, config, base)
            case Format.SAFETENSORS:
                save_tensors(found.tensors, part)
            case Format.FAIRSEQ:
                torch.save(_fairseq_checkpoint(found), part)
            case Format.STATE_DICT:
                torch.save(found.tensors, part)
    return chosen


def _default_format(out: Path, found: Source) -> Format:
    if out.suffix == ".safetensors":
        return Format.SAFETENSORS
    if out.suffix in (".pt", ".pth", ".bin"):
        return Format.FAIRSEQ if found.fairseq else Format.STATE_DICT
    return Format.HF


@contextmanager
def _written(out: Path) -> Iterator[Path]:
    """Yields a path beside ``out``, which is renamed to ``out`` when all is written, and removed otherwise."""
    part = out.with_name(f".{out.name}.part")
    try:
        _remove(part)  # of an export that was killed
        yield part
        part.replace(out)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ConfigurationError(f"{out} cannot be written: {why_not_written(error, out.parent)}") from error
    finally:
        with suppress(OSError):  # on a disk that cannot be written to, there is nothing to remove
            _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _fairseq_checkpoint(found: Source) -> State:
    """Returns fairseq's checkpoint without optimizer states, with the parameters in the checkpoint's own precision."""
    if not found.fairseq:
        raise ConfigurationError(
            f"{found.directory}: there is no checkpoint of fairseq, whose configuration --format fairseq needs"
        )
    return found.fairseq | {"model": found.tensors}
