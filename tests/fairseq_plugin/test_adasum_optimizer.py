"""The optimizer of ``--optimizer adasum`` against both of its forms in double precision."""

import copy
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fairseq_async.algorithms import adasum
from fairseq_async.fairseq_plugin.synchronous import adasum as plugin
from fairseq_async.fairseq_plugin.synchronous.adasum import AdasumOptimizer
from tests.helpers.fairseq_flags import parsed
from tests.helpers.fairseq_jobs import ADAM, ADASUM


class Together:
    """Ranks as threads of this process, with Adasum by its reference."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.rank = ranks, threading.local()
        self._barrier, self._given = threading.Barrier(ranks, timeout=60), [[Tensor()]] * ranks

    def exchange(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        self._given[self.rank.number] = [tensor.clone() for tensor in tensors]
        self._barrier.wait()
        everyones = list(self._given)
        self._barrier.wait()
        return everyones

    def combine(self, tensors: Sequence[Tensor]) -> None:
        for index, of_ranks in enumerate(zip(*self.exchange(tensors), strict=True)):
            tensors[index].copy_(adasum(of_ranks))

    def all_reduce(self, tensor: Tensor, group: Any = None) -> None:
        tensor.copy_(sum(given for (given,) in self.exchange([tensor])))

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.ranks

        def thread(rank: int) -> None:
            self.rank.number = rank
            results[rank] = work(rank)

        threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(self.ranks)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return results


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in ((4, 3), (4,))]


def trained(
    together: Together, cfg: Any, start: nn.Module, tokens: Sequence[float], steps: int, empty: int = -1
) -> list[Tensor]:
    """What two ranks come to, calling the optimizer as fairseq's trainer does; the norm is clipped to 1.

    Args:
        empty: the step for which the second rank has no batch.
    """

    def work(rank: int) -> list[Tensor]:
        model = copy.deepcopy(start)
        method = AdasumOptimizer(cfg.optimizer, model.parameters())
        method.combine = together.combine
        for step in range(steps):
            own, whole = tokens[rank] * (rank == 0 or step != empty), sum(tokens[: 1 if step == empty else 2])
            for parameter, gradient in zip(model.parameters(), gradients(rank, step), strict=True):
                parameter.grad = gradient * own
            method.share = whole / 2 / own if own else 0.0
            method.all_reduce_grads(model)
            method.multiply_grads(2 / whole)
            method.clip_grad_norm(1.0)
            method.step()
        method.states.gathered = [{"of": "another rank"}]
        assert [method.state_dict()["adasum"]["ranks"] for _ in range(2)] == [[{"of": "another rank"}], []]
        return list(model.parameters())

    first, second = together.run(work)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return first


def test_the_gradient_form_is_the_adasum_of_the_mean_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against momentum-SGD in double precision: sums over 5 and 3 tokens, clipped after they are combined."""
    cfg = parsed(monkeypatch, *ADASUM, "--inner-optimizer", "sgd", "--momentum", "0.9", "--lr", "0.1")
    torch.manual_seed(5)
    start = nn.Linear(3, 4)
    result = trained(Together(2), cfg, start, (5.0, 3.0), 3)
    expected = copy.deepcopy(start).double()
    sgd = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        pairs = zip(gradients(0, step), gradients(1, step), strict=True)
        for parameter, pair in zip(expected.parameters(), pairs, strict=True):
            parameter.grad = adasum([gradient.double() for gradient in pair])
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        sgd.step()
    for tensor, parameter in zip(result, expected.parameters(), strict=True):
        assert torch.allclose(tensor.double(), parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("clip", "empty"), [(0.0, -1), (0.01, -1), (0.0, 2)])
def test_the_delta_form_is_the_adasum_of_the_steps_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch, clip: float, empty: int
) -> None:
    """Against Adam in double precision: sums over 5 and 3 tokens, clipped by the mean square norm. A rank without a
    batch takes no step by its moments."""
    together, tokens, steps = Together(2), (5.0, 3.0), 3
    monkeypatch.setattr(plugin.dist, "all_reduce", together.all_reduce)
    cfg = parsed(monkeypatch, *ADASUM, *ADAM, "--lr", "0.02", "--adasum-clip-delta", clip)
    torch.manual_seed(5)
    start = nn.Linear(3, 4)
    first = trained(together, cfg, start, tokens, steps, empty)
    now = [parameter.detach().double() for parameter in start.parameters()]
    replicas = [[Parameter(tensor.clone()) for tensor in now] for _ in range(2)]
    adams = [torch.optim.Adam(replica, lr=0.02, betas=(0.9, 0.98), eps=1e-8) for replica in replicas]
    for step in range(steps):
        own = [[gradient.double() for gradient in gradients(rank, step)] for rank in range(2)]
        if step == empty:
            own[1] = [torch.zeros_like(gradient) for gradient in own[1]]
        norm = math.sqrt(sum(float(g.square().sum()) for of_rank in own for g in of_rank) / (1 + (step != empty)))
        for replica, adam, of_rank in zip(replicas, adams, own, strict=True):
            for parameter, tensor, gradient in zip(replica, now, of_rank, strict=True):
                parameter.data.copy_(tensor)
                parameter.grad = gradient * min(1.0, 1.0 / norm)
            adam.step()
        if step == empty:
            for parameter, tensor in zip(replicas[1], now, strict=True):
                parameter.data.copy_(tensor)
        deltas = [adasum([r[i].detach() - tensor for r in replicas]) for i, tensor in enumerate(now)]
        length = math.sqrt(sum(float(delta.square().sum()) for delta in deltas))
        factor = min(1.0, clip / length) if clip else 1.0
        now = [tensor + factor * delta for tensor, delta in zip(now, deltas, strict=True)]
    for result, expected in zip(first, now, strict=True):
        assert torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-6)
