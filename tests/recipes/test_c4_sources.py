"""A training set whose parts are about different things."""

import numpy as np
import torch

from recipes.c4_lm.sources import by_source, cluster
from recipes.c4_lm.tokens import EOS


def documents(generator: np.random.Generator, count: int) -> list[np.ndarray]:
    """Of three kinds, in turn: tokens 10 to 19, 20 to 29 and 30 to 39, and some that all have."""
    kinds = [10 * (1 + index % 3) for index in range(count)]
    return [np.concatenate([k + generator.integers(0, 10, 20), generator.integers(4, 10, 5), [EOS]]) for k in kinds]


def test_documents_of_a_kind_come_together_and_nothing_is_lost() -> None:
    tokens = np.concatenate(documents(np.random.default_rng(0), 60)).astype(np.uint16)
    sorted_tokens = by_source(tokens, vocab_size=40, sources=3, seed=1)
    parts = np.split(sorted_tokens, 3)
    for part in parts:
        kinds = part[part >= 10] // 10
        assert len(set(kinds)) == 1  # a third of the set is one kind
    assert len({int(part[part >= 10][0]) // 10 for part in parts}) == 3
    assert sorted(sorted_tokens) == sorted(tokens) and sorted_tokens[-1] == EOS and sorted_tokens.dtype == tokens.dtype


def test_no_source_is_longer_than_its_share_by_more_than_a_document() -> None:
    generator = torch.Generator().manual_seed(3)
    points = torch.nn.functional.normalize(torch.rand(200, 8, generator=generator))
    lengths = torch.randint(1, 30, (200,), generator=generator)
    assigned = cluster(points, lengths, sources=4, seed=1)
    sums = torch.zeros(4, dtype=lengths.dtype).index_add_(0, assigned, lengths)
    assert 0 < (sums - lengths.sum() / 4).max() <= 30 and len(sums.nonzero()) == 4
