"""A simulation whose parameters are on a GPU: codecs compute in the CPU's memory, and all the rest where they are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fairseq_async.algorithms import ErrorFeedback, HybridAccumulation, NesterovMomentum, TopK, Update
from fairseq_async.method.spec import MethodSpec
from fairseq_async.protocol import Layout
from fairseq_async.server.compressed_starts import compressed_starts
from fairseq_async.server.parameter_server import ParameterServer
from recipes.rules.count_sketch import CountSketch
from recipes.rules.gs_sgd import GsSGD
from tests.helpers.other_device import OnAnotherDevice, elsewhere, loaded_elsewhere

SIZE = 40
Place = Callable[[Tensor], Tensor]


def vectors(count: int) -> list[Tensor]:
    return list(torch.randn(count, SIZE, generator=torch.Generator().manual_seed(1)))


def starts_of_a_run(pull: str, place: Place) -> list[tuple[bytes, list[float]]]:
    """Payloads and parameters that a worker gets, of the first versions and ahead of them, a resumption between."""
    start, *updates = map(place, vectors(5))
    server = ParameterServer(start, NesterovMomentum(0.5, 0.9, 1), keeps_last_step=True)
    spec = MethodSpec("local_sgd", 1, {"outer": "nesterov", "compress": {"pull": pull}})
    layout, got = Layout.of([("it", torch.zeros(SIZE))]), []
    encoder = compressed_starts(spec, layout)
    assert encoder is not None
    encoder.note_taken(0, server.parameters, None)
    for number, update in enumerate(updates):
        server.push(Update(0, number, number, 1.0, update))
        for ahead in (0.0, 1.5):
            encoder.follow(server)
            own = encoder.of(0, None)
            payload = None if own is None else own.payload(server, ahead)
            assert own is not None and payload is not None
            got.append((payload.numpy().tobytes(), own.decode(payload).tolist()))
        state = encoder.state_dict()
        encoder = compressed_starts(spec, layout)
        assert encoder is not None
        encoder.load_state_dict(state if place is torch.clone else loaded_elsewhere(state))
    return got


@pytest.mark.parametrize("pull", ["bf16", "int8", "e3m0"])
def test_parameters_are_encoded_to_the_same_bytes(pull: str) -> None:
    assert starts_of_a_run(pull, elsewhere) == starts_of_a_run(pull, torch.clone)


@pytest.mark.parametrize("pending", [True, False])
def test_a_residual_goes_on_from_a_state_that_was_loaded_there(pending: bool) -> None:
    straight, resumed = (ErrorFeedback(TopK(8, 2)) for _ in range(2))
    first, second = vectors(2)
    straight.send(first)
    if not pending:
        straight.acknowledge()
    resumed.load_state_dict(loaded_elsewhere(straight.state_dict()))
    for each in (straight, resumed):
        each.acknowledge()
    assert resumed.send(elsewhere(second)) == straight.send(second)
    assert type(resumed.residual) is Tensor and torch.equal(resumed.residual, straight.residual)


def test_gs_sgd_takes_the_same_steps() -> None:
    ends = []
    for place in (torch.clone, elsewhere):
        start, *gradients = map(place, vectors(9))
        accumulation = HybridAccumulation(torch.optim.SGD([start], 0.1), 1)
        rule = GsSGD(accumulation, 2, CountSketch(rows=5, columns=256), keep=3, candidates=4)
        for number, gradient in enumerate(gradients):
            rule.apply(start, Update(number % 2, number // 2, 0, 1.0, gradient))
        ends.append(start.tolist())
    assert ends[0] == ends[1]


def test_the_other_device_is_no_cpu() -> None:
    """The tests above can fail."""
    here, there = torch.ones(3), elsewhere(torch.ones(3))
    for wrong in (lambda: here + there, lambda: there.sub_(here), lambda: torch.cat([there, here])):
        with pytest.raises(RuntimeError, match="same device"):
            wrong()
    with pytest.raises(TypeError, match="another device"):
        there.numpy()
    assert type(there.cpu()) is Tensor and type(here.to(there)) is type(there * 2) is OnAnotherDevice
