"""Where the range of an option ends, and what a codec is built with."""

from contextlib import nullcontext
from typing import Any

import pytest

from fairseq_async import algorithms
from fairseq_async.errors import ConfigurationError
from fairseq_async.method import methods
from fairseq_async.options import compression
from fairseq_async.options.addresses import is_loopback
from fairseq_async.options.config import AdasumOptions, HybridOptions, LocalSGDOptions, Section
from fairseq_async.options.validation import checked, split_address

BINS = "adacomp:scale=bin,bin_size"
EDGES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [  # options that are taken, and changes that are not
    (Section, {"worker_timeout": 1e9}, {"worker_timeout": 1.1e9}),
    (Section, {"worker_timeout": 1}, {"worker_timeout": True}),
    (Section, {"server_timeout": 0}, {"server_timeout": -1.0}),
    (Section, {"snapshot_seconds": 1e9}, {"snapshot_seconds": 0}),
    (Section, {"max_update_norm_ratio": 1.1}, {"max_update_norm_ratio": 1.0}),
    (Section, {"server_shards": 64}, {"server_shards": 65}),
    (Section, {"server_shards": "2, a:1, b:65535"}, {"server_shards": "2,a:1,b:65536"}),
    (Section, {"server_shards": "a:1,a:2"}, {"server_shards": "a:1,a:1"}),
    (Section, {"run_dir": "."}, {"run_dir": ""}),
    (HybridOptions, {"look_ahead": 1024}, {"look_ahead": 1025}),
    (HybridOptions, {"micro_batches": 1 << 16}, {"micro_batches": (1 << 16) + 1}),
    (HybridOptions, {"barrier": True, "look_ahead": "off"}, {"look_ahead": 0.5}),
    (LocalSGDOptions, {"staleness_power": -0.5}, {"staleness_power": 0.5}),
    (LocalSGDOptions, {"outer": "nesterov", "outer_momentum": 0.0}, {"outer_momentum": 1.0}),
    (LocalSGDOptions, {"overlap": True}, {"grace_period": 0.0}),
    (LocalSGDOptions, {"fragments": 3, "local_steps": 6, "fragment_delay": 2}, {"fragment_delay": 3}),
    (LocalSGDOptions, {"fragments": 3, "local_steps": 6}, {"local_steps": 7}),
    (LocalSGDOptions, {"upstream": "a:1,region=0"}, {"upstream": "a,region=0"}),
    (LocalSGDOptions, {"compress": "topk:chunk=8,keep=8,bits=8"}, {"compress": "topk:bits=9"}),
    (LocalSGDOptions, {"compress": "topk:chunk=65536"}, {"compress": "topk:chunk=65537"}),
    (LocalSGDOptions, {"compress": "adacomp:bin-size=65535"}, {"compress": "adacomp:bin_size=65536"}),
    (
        LocalSGDOptions,
        {"compress": "adacomp:scale=bin,bin_size=16384"},
        {"compress": "adacomp:scale=bin,bin_size=16385"},
    ),
    (LocalSGDOptions, {"compress": "dqsgd:bits=2"}, {"compress": "dqsgd:bits=1"}),
    (LocalSGDOptions, {"compress": "none"}, {"compress": "none:block=3"}),
]


@pytest.mark.parametrize(("model", "taken", "change"), EDGES, ids=str)
def test_an_option_is_taken_up_to_the_end_of_its_range(
    model: Any, taken: dict[str, Any], change: dict[str, Any]
) -> None:
    for given in (taken, taken | change):
        with nullcontext() if given is taken else pytest.raises(ConfigurationError):
            checked(model, given, "here") if model is Section else methods.parse(model, given, "here")


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        ("diloco", (0.7, 0.9, None)),
        ("nesterov", (0.7, 0.9, False)),
        ("buffered_nesterov", (0.7, 0.9, False)),
        ("delayed_nesterov", (0.7, 0.9, False)),
        ("sgd", (1.2, None, None)),
        ("mla", (0.3, 0.9, True)),
        ("heloco", (0.7, 0.9, True)),
    ],
)
def test_each_outer_rule_has_its_own_rate_momentum_and_start(outer: str, expected: tuple[object, ...]) -> None:
    options = methods.parse(LocalSGDOptions, {"outer": outer}, "here").model_dump()
    assert tuple(map(options.get, ("outer_lr", "outer_momentum", "start_ahead"))) == expected


def test_a_momentum_may_have_all_of_its_share_in_each_step_and_a_delay_that_is_given_stays() -> None:
    given = {"outer": "delayed_nesterov", "delay": 3, "c": 1 / 3}
    assert methods.parse(LocalSGDOptions, given, "here").for_workers(5).model_dump()["delay"] == 3
    buffered = methods.parse(LocalSGDOptions, {"outer": "buffered_nesterov", "delay": 3}, "here")
    assert buffered.for_workers(5).model_dump()["delay"] == 3


@pytest.mark.parametrize("name", ["sync_state", "clip_delta"])
@pytest.mark.parametrize(("form", "adaptive", "found"), [("delta", False, "delta"), ("gradient", True, "gradient")])
def test_the_form_of_adasum_that_is_given_is_that_of_any_optimizer(
    name: str, form: str, adaptive: bool, found: str
) -> None:
    assert AdasumOptions.model_validate({"form": form}).form_for("SGD", adaptive) == found
    with nullcontext() if found == "delta" else pytest.raises(ConfigurationError, match="is of the delta form"):
        AdasumOptions.model_validate({"form": form, name: 1}).form_for("SGD", adaptive)


@pytest.mark.parametrize(
    ("given", "codec"),
    [
        ("int8", algorithms.Int8(256)),
        ("int8:block=3", algorithms.Int8(3)),
        ("e3m0", algorithms.E3M0(256)),
        ("e3m0:block=3", algorithms.E3M0(3)),
        ("topk", algorithms.TopK(4096, 64, 2)),
        ("topk:chunk=9,keep=5,bits=3", algorithms.TopK(9, 5, 3)),
        ("adacomp", algorithms.AdaComp(500)),
        ("adacomp:bin_size=7", algorithms.AdaComp(7)),
        ("adacomp:bin_size=7,scale=bin", algorithms.AdaCompBins(7)),
        ("dqsgd", algorithms.DQSGD(4, None, "l2")),
        ("dqsgd:bits=6,block=5,norm=max", algorithms.DQSGD(6, 5, "max")),
    ],
)
def test_a_codec_has_each_parameter_that_is_given_and_its_own_defaults(given: str, codec: Any) -> None:
    options = compression.parse(given).push
    assert options is not None
    built = compression.build(options)
    assert type(built) is type(codec)
    own, expected = ({name: str(value) for name, value in vars(each).items()} for each in (built, codec))
    assert own == expected


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("a", False),
    ],
)
def test_other_machines_reach_every_address_but_this_machines_own(host: str, is_here: bool) -> None:
    """Who cannot be reached needs no secret."""
    assert is_loopback(host) is is_here


def test_a_port_is_a_number_of_16_bits() -> None:
    assert split_address("a:65535") == ("a", 65535)
    for port in ("65536", "٣", "-1", ""):
        with pytest.raises(ValueError, match="an address is written HOST:PORT"):
            split_address(f"a:{port}")
