"""A translation problem on fairseq's binarised data."""

import logging
import shlex
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig
from sacrebleu.metrics import BLEU
from torch import Tensor

from fairseq_async.errors import ConfigurationError

Sample = dict[str, Any]  # a batch of fairseq's: its tensors by name


class Translation:
    """A translation model with criterion and data, as ``fairseq-train`` makes them from its flags.

    A sample is one batch of at most ``--max-tokens`` tokens; set ``batch_size: 1`` in the experiment.

    Args:
        data: directory that fairseq-preprocess has made.
        flags: flags of fairseq-train for task, model, criterion and batches; those of optimizer and schedule have no
            effect.
        validation: number of validation batches to evaluate; 0 for all. Their loss is without label smoothing.
    """

    def __init__(self, seed: int, device: torch.device, data: Path, flags: str = "", validation: int = 0) -> None:
        logging.getLogger("fairseq").setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fairseq's libraries warn of each other
            cfg = _configuration([str(data), *shlex.split(flags), "--seed", str(seed)])
        utils.set_torch_seed(seed)
        self.device = device
        try:
            self.task = tasks.setup_task(cfg.task)
            self.model = self.task.build_model(cfg.model).to(device)
            self.criterion = self.task.build_criterion(cfg.criterion).to(device)
            self.train = _shuffled(self._batches(cfg, cfg.dataset.train_subset), seed)
            self.held_out = self._batches(cfg, cfg.dataset.valid_subset)[: validation or None]
        except Exception as error:  # fairseq raises a bare one where it cannot infer the languages
            raise ConfigurationError(
                f'"problem": fairseq cannot use "data" {data} with these "flags": {error}'
            ) from error
        self.samples = len(self.train)

    def _batches(self, cfg: DictConfig, split: str) -> list[Sample]:
        return self._collated(split, cfg.dataset.max_tokens, cfg.dataset.batch_size, cfg.common.seed)

    def _collated(
        self, split: str, max_tokens: int | None, max_sentences: int | None = None, seed: int = 1
    ) -> list[Sample]:
        self.task.load_dataset(split)
        data = self.task.dataset(split)
        iterator = self.task.get_batch_iterator(
            dataset=data,
            max_tokens=max_tokens,
            max_sentences=max_sentences,
            max_positions=utils.resolve_max_positions(self.task.max_positions(), self.model.max_positions()),
            ignore_invalid_inputs=True,
            seed=seed,
        )
        return [data.collater([data[index] for index in batch]) for batch in iterator.frozen_batches]

    def batch(self, indices: Sequence[int]) -> list[Sample]:
        """Returns the samples, each of which is a batch of fairseq's."""
        return [self._on_device(self.train[index]) for index in indices]

    def loss(self, batch: list[Sample]) -> tuple[Tensor, float]:
        """Returns the mean of the criterion per target token, and the number of tokens."""
        parts = [self.criterion(self.model, sample)[:2] for sample in batch]
        tokens = float(sum(size for _, size in parts))
        return sum((loss for loss, _ in parts), torch.zeros((), device=self.device)) / tokens, tokens

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the mean negative log likelihood per target token of the validation batches."""
        self.model.eval()
        total = tokens = 0.0
        for sample in self.held_out:
            _, size, log = self.criterion(self.model, self._on_device(sample))
            total, tokens = total + float(log.get("nll_loss", log["loss"])), tokens + float(size)
        self.model.train()
        return total / tokens

    @torch.no_grad()
    def bleu(self, split: str = "test", beam: int = 5, pieces: str | None = "sentencepiece") -> float:
        """Returns sacrebleu's score of the model's translations of a split, beside the split's own targets.

        Args:
            pieces: the kind of subwords that are joined in both, as fairseq-generate's ``--remove-bpe`` names it.
        """
        generator = self.task.build_generator([self.model], Namespace(beam=beam))
        words = self.task.target_dictionary
        translations, references = [], []
        for sample in self._collated(split, max_tokens=4096):
            found = self.task.inference_step(generator, [self.model.eval()], self._on_device(sample))
            targets = (utils.strip_pad(target, words.pad()) for target in sample["target"])
            translations += [words.string(best["tokens"].cpu(), pieces) for best, *_ in found]
            references += [words.string(target, pieces, escape_unk=True) for target in targets]
        self.model.train()
        return float(BLEU().corpus_score(translations, [references]).score)

    def _on_device(self, sample: Sample) -> Sample:
        moved: Sample = utils.move_to_cuda(sample, self.device) if self.device.type == "cuda" else sample
        return moved


def _shuffled(batches: list[Sample], seed: int) -> list[Sample]:
    """Puts batches, which are sorted by length, into the order of a seed: else one worker's part of the data would have
    the short sentences, and another's the long ones. fairseq shuffles them before it divides them, too."""
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed))
    return [batches[index] for index in order]


def _configuration(arguments: list[str]) -> DictConfig:
    parser = options.get_training_parser("translation")

    def refuse(message: str) -> None:
        raise ConfigurationError(f'"problem": "flags": {message}')

    parser.error = refuse
    try:
        return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))
    except SystemExit as error:
        raise ConfigurationError('"problem": "flags": fairseq-train does not take them') from error
    except RuntimeError as error:  # fairseq says nothing where it does not know the model
        raise ConfigurationError('"problem": "flags": --arch is missing') from error
