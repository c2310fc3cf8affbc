"""Makes a training set that is not i.i.d.: sorts its documents into k sources by topic, one source after another.

The DiLoCo paper makes such data the same way (arXiv 2311.08105, section 3): by k-means over the documents, here over
the frequencies of their tokens. The sources have about equally many tokens, so equal shards of the training set are the
sources.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recipes.c4_lm.tokens import EOS

_ROUNDS = 20


def by_source(tokens: np.ndarray, vocab_size: int, sources: int, seed: int) -> np.ndarray:
    """Return the tokens of all documents, sorted by source."""
    ends = np.flatnonzero(tokens == EOS) + 1
    documents = np.split(tokens, ends[:-1])
    lengths = torch.tensor([len(document) for document in documents])
    assigned = cluster(features(documents, vocab_size), lengths, sources, seed)
    return np.concatenate([documents[index] for index in assigned.argsort(stable=True).tolist()])


def features(documents: list[np.ndarray], vocab_size: int) -> Tensor:
    """Return a row of norm 1 per document: how often it has each token, weighted by the token's rarity (tf-idf)."""
    counts = torch.stack([torch.from_numpy(np.bincount(each, minlength=vocab_size)).float() for each in documents])
    rarity = torch.log(len(documents) / (1 + (counts > 0).sum(0)))
    return torch.nn.functional.normalize(counts.log1p() * rarity.clamp(min=0.0))


def cluster(points: Tensor, lengths: Tensor, sources: int, seed: int) -> Tensor:
    """Return the source of each point, by k-means with cosine similarity.

    A source exceeds its equal share of the total length by its last point at most.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = points[torch.randperm(len(points), generator=generator)[:sources]]
    for _ in range(_ROUNDS):
        assigned = _balanced(points @ centres.T, lengths)
        sums = torch.zeros_like(centres).index_add_(0, assigned, points)
        centres = torch.nn.functional.normalize(sums)
    return assigned


def _balanced(similarity: Tensor, lengths: Tensor) -> Tensor:
    """Assign each point to the nearest centre that has room; points with the clearest preference choose first."""
    room = [lengths.sum().item() / similarity.shape[1]] * similarity.shape[1]
    best = similarity.topk(min(2, similarity.shape[1])).values
    assigned = torch.zeros(len(similarity), dtype=torch.long)
    preferences = similarity.argsort(dim=1, descending=True).tolist()
    for point in (best[:, 0] - best[:, -1]).argsort(descending=True).tolist():
        source = next((each for each in preferences[point] if room[each] > 0), preferences[point][-1])
        assigned[point], room[source] = source, room[source] - lengths[point].item()
    return assigned
