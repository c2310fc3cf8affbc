"""What workers start from, encoded: what int8 loses of a version goes with the next, and no error adds up."""

import math
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fairseq_async.algorithms import BF16, FragmentedRule, Update, fragments_of
from fairseq_async.options import compression
from fairseq_async.server.compressed_starts import CompressedFragments, CompressedStarts
from fairseq_async.server.parameter_server import ParameterServer


@dataclass
class Adder:
    """Adds what it gets; workers start ``ahead`` of the parameters."""

    ahead: float = 0.0
    momentum_buffer: Tensor | None = field(default=None)

    def moves_parameters(self, ahead: int = 0) -> bool:
        return True

    def apply(self, parameters: Tensor, update: Update) -> bool:
        parameters.add_(update.delta)
        return True

    def dispatch(self, parameters: Tensor) -> Tensor:
        return parameters + self.ahead if self.ahead else parameters

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass


class Server:
    """A server whose parameters are added to, and what it gives of each version."""

    def __init__(self, codec: str, first: list[float], ahead: float = 0.0, looks_ahead: bool = False) -> None:
        self.parameters = torch.tensor(first)
        rule = Adder(ahead)
        self.server = ParameterServer(self.parameters, rule, keeps_last_step=looks_ahead)  # type: ignore[arg-type]
        self.codec = codec
        self.starts = self.new_starts()
        self.starts.follow(self.server)

    def new_starts(self) -> CompressedStarts:
        pull = compression.parse(f"pull={self.codec}").pull
        assert pull is not None
        return CompressedStarts(pull)

    def add(self, values: list[float]) -> None:
        sequence = self.server.sequences.get(0, -1) + 1
        self.server.push(Update(0, sequence, self.server.version, 1.0, torch.tensor(values)))
        self.starts.follow(self.server)

    def given(self, look_ahead: float = 0.0) -> Tensor:
        payload = self.starts.payload(self.server, look_ahead)
        assert payload is not None
        return self.starts.decode(payload)


def test_bf16_gives_rounded_parameters_and_keeps_nothing() -> None:
    """Steps of 2^-10 of one do not show before they are half of its last bit, which is 2^-7."""
    it = Server("bf16", [1.0, 1.0])
    given = []
    for _ in range(8):
        given.append(it.given()[1].item())
        it.add([0.0, 2**-10])
    assert given == [1.0] * 5 + [1 + 2**-7] * 3 and it.given()[1] == it.parameters[1] == 1 + 2**-7
    assert it.starts.state_dict()["carried"] is None


def test_what_int8_loses_of_a_version_goes_with_the_next() -> None:
    """Its levels are whole numbers here: 0.4 is given as 0, then 0.8 as 1, then 0.2 as 0, …"""
    it = Server("int8", [127.0, 0.4, -0.4])
    found = [it.given()[1:].tolist()]
    for _ in range(4):
        it.add([0.0, 0.0, 0.0])
        found.append(it.given()[1:].tolist())
    assert [pair[0] for pair in found] == [0, 1, 0, 1, 0] and [pair[1] for pair in found] == [0, -1, 0, -1, 0]
    assert it.parameters.tolist() == pytest.approx([127.0, 0.4, -0.4])


def test_a_version_is_encoded_once_for_all_who_ask() -> None:
    it = Server("int8", [127.0, 0.4])
    first = it.starts.payload(it.server)
    assert first is not None and it.starts.payload(it.server) is first
    it.add([0.0, 0.0])
    assert it.given().tolist() == [127.0, 1.0]


@given(
    st.lists(
        st.lists(st.floats(-1, 1, width=32), min_size=5, max_size=5),
        min_size=1,
        max_size=12,
    )
)
def test_errors_of_encoding_do_not_add_up(steps: list[list[float]]) -> None:
    """What was given of all versions, and the last loss, are the sum of all versions; each loss is below one level."""
    it = Server("int8:block=5", [3.0, -1.0, 0.25, 0.0, 1e-3])
    truth, total, largest = it.parameters.double(), it.given().double(), 3.0
    for step in steps:
        it.add(step)
        given, largest = it.given(), max(largest, float(it.parameters.abs().max()))
        truth, total = truth + it.parameters, total + given
        assert float((given - it.parameters).abs().max()) <= 1.1 * largest / 127
    assert float((truth - total).abs().max()) <= 0.6 * largest / 127


def test_what_lies_ahead_is_given_with_the_loss_and_leaves_it() -> None:
    it = Server("int8", [127.0, 0.4], looks_ahead=True)
    it.add([0.0, 0.0])
    assert it.given(look_ahead=2.0).tolist() == [127.0, 1.0]  # no step to look along: as of the version itself
    it.add([0.0, 3.0])
    assert it.given(look_ahead=2.0).tolist() == [127.0, 9.0]  # 3.4 + 2 · 3 − 0.2
    assert it.given().tolist() == [127.0, 3.0]  # 3.4 − 0.2
    rounded = Server("bf16", [1.0, 2.0], looks_ahead=True)
    rounded.add([0.5, 0.001])
    assert rounded.given(look_ahead=3.0).tolist() == [3.0, 2.0]


def test_local_steps_of_a_rule_that_looks_ahead_start_from_what_it_dispatches() -> None:
    it = Server("bf16", [1.0, 2.0], ahead=0.5)
    assert it.given().tolist() == [1.5, 2.5] and it.parameters.tolist() == [1.0, 2.0]


def test_a_server_that_goes_on_from_a_state_gives_the_same_bits() -> None:
    it = Server("int8", [127.0, 0.4, 5.3])
    it.add([0.1, 0.2, 0.3])
    state = deepcopy(it.starts.state_dict())
    given, first = it.given(), it.starts
    it.starts = it.new_starts()
    it.starts.load_state_dict(state)
    assert torch.equal(it.given(), given)
    it.add([0.1, 0.2, 0.3])
    first.follow(it.server)
    then = first.payload(it.server)
    assert then is not None and torch.equal(first.decode(then), it.given())


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_parameters_with_nan_have_no_payload_and_those_after_them_have(codec: str, bad: float) -> None:
    it = Server(codec, [127.0, 0.4])
    it.parameters[1] = bad
    it.server.version += 1
    assert it.starts.payload(it.server) is None
    it.parameters[1] = 2.0
    it.server.version += 1
    assert it.given().tolist() == [127.0, 2.0]


def test_bf16_is_what_its_codec_makes() -> None:
    it = Server("bf16", [0.1, -3e38, 7.7])
    payload = it.starts.payload(it.server)
    assert payload is not None and payload.numpy().tobytes() == BF16().encode(it.parameters)


class InFragments:
    """Two fragments, of two values and of one, and what is given of each."""

    def __init__(self) -> None:
        self.parameters = torch.tensor([127.0, 0.4, 127.0])
        rule = FragmentedRule(fragments_of([2, 1], 2), [Adder(), Adder()])  # type: ignore[list-item]
        self.server = ParameterServer(self.parameters, rule)
        pull = compression.parse("pull=int8").pull
        assert pull is not None
        self.starts = CompressedFragments([CompressedStarts(pull, fragment) for fragment in (0, 1)])
        self.starts.follow(self.server)

    def push(self, values: list[float]) -> None:
        sequence = self.server.sequences.get(0, -1) + 1
        self.server.push(Update(0, sequence, self.server.version, 1.0, torch.tensor(values)))
        self.starts.follow(self.server)

    def given(self, fragment: int) -> list[float]:
        starts = self.starts.of(0, fragment)
        assert starts is not None
        payload = starts.payload(self.server)
        assert payload is not None
        found: list[float] = starts.decode(payload).tolist()
        return found


def test_a_fragment_is_encoded_when_it_has_changed_and_not_with_the_others() -> None:
    """0.4 is given as 0, then 0.8 as 1, as for a model of its own; the whole model has no payload."""
    it = InFragments()
    found = [it.given(0)]
    for sequence in range(4):
        it.push([0.0, 0.0] if sequence % 2 == 0 else [0.0])
        found.append(it.given(0))
    assert [values[1] for values in found] == [0, 1, 1, 0, 0]
    assert it.given(1) == it.given(3) == [127.0] and it.starts.of(0, None) is None


def test_fragments_go_on_from_the_state_of_others() -> None:
    it, other = InFragments(), InFragments()
    for sequence in range(3):
        it.push([0.0, 0.1] if sequence % 2 == 0 else [-1.0])
    other.server.load_state_dict(deepcopy(it.server.state_dict()))
    other.starts.load_state_dict(deepcopy(it.starts.state_dict()))
    for each in (it, other):
        each.push([-1.0])
        each.push([0.0, 0.1])
    assert it.given(0) == other.given(0) and it.given(1) == other.given(1)
