"""One model per method: its flags, its keys, its description of a run, and the tables of the documents."""

import json
import math
from argparse import ArgumentParser
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from itertools import combinations
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fairseq_async.errors import ConfigurationError, as_argument, as_flag, as_key, spell_options
from fairseq_async.method import methods, option_flags
from fairseq_async.method.methods import OuterRule, register_outer_rule
from fairseq_async.method.option_checks import check_ranks
from fairseq_async.method.spec import MethodSpec, ServerSettings, global_spec, hybrid_spec, local_sgd_spec
from fairseq_async.options.config import (
    AdaScaleOptions,
    AdasumOptions,
    DelayedNesterovOptions,
    DiLoCoOptions,
    HybridOptions,
    LocalSGDOptions,
    OuterSGDOptions,
    Section,
    ServerOptions,
    divides_by_default,
)
from fairseq_async.pytorch.options import parse_options
from scripts import option_tables

OUTER = st.sampled_from(["diloco", "nesterov", "buffered_nesterov", "delayed_nesterov", "sgd"])  # of version 0.1
SERVERS = st.builds(
    ServerOptions,
    worker_timeout=st.floats(0.1, 100),
    snapshot_seconds=st.floats(1, 100),
    max_update_norm_ratio=st.none() | st.floats(1.5, 9),
    record=st.booleans(),
)


@st.composite
def local_sgd(draw: st.DrawFn) -> MethodSpec:
    """Any rule, with a value drawn for some of the options that it has."""
    outer = draw(OUTER)
    possible: dict[str, st.SearchStrategy[Any]] = {
        "local_steps": st.integers(1, 99),
        "outer_lr": st.floats(0.1, 2),
        "delay": st.integers(1, 9),
        "dynamic_local_steps": st.booleans(),
        "grace_period": st.floats(0, 9),
        "staleness_power": st.floats(-2, 0),
        "staleness_limit": st.integers(0, 9),
        "delay_compensation": st.floats(0, 1),
        "seed": st.integers(0, 99),
    }
    has = methods.outer_rule(outer).options.model_fields
    values = {key: draw(value) for key, value in possible.items() if key in has and draw(st.booleans())}
    options = methods.parse(LocalSGDOptions, {"outer": outer, **values}, "test")
    shards, max_epoch = draw(st.lists(st.integers(1, 99), max_size=3)), draw(st.integers(0, 3))
    return local_sgd_spec(options, draw(st.integers(1, 8)), shards, draw(SERVERS), {"update_freq": [1]}, max_epoch)


@st.composite
def hybrid(draw: st.DrawFn) -> MethodSpec:
    workers = draw(st.integers(1, 8))
    options = HybridOptions(
        updates_per_step=draw(st.integers(1, workers)),
        barrier=draw(st.booleans()),
        look_ahead=0.0,
        seed=draw(st.integers(0, 9)),
    )
    framework = {"inner_optimizer": {"_name": "adam"}, "lr_scheduler": {"_name": "fixed"}, "clip_norm": 1.0}
    last = draw(st.integers(0, 99))
    return hybrid_spec(options, workers, draw(SERVERS), framework, last, draw(st.integers(0, 3)))


# version 0.1 did not have them
_LATER = ("closes_early", "grace_share", "look_ahead", "whole_steps", "quorum", "counts_in_rounds", "micro_batches")


def as_version_0_1(spec: MethodSpec) -> dict[str, Any]:
    """What version 0.1 wrote of a method: all options at one level."""
    shown = {each.name: getattr(spec, each.name) for each in fields(spec)}
    short = {"power": "staleness_power", "limit": "staleness_limit", "compensation": "delay_compensation"}
    staleness = {key: shown.pop(name) for key, name in short.items()}
    options = {key: value for key, value in shown.pop("options").items() if key not in _LATER}
    levels = options | asdict(shown.pop("server")) | shown.pop("framework")
    if spec.method == "hybrid_async":
        unused = {"grace_period", "waits_for_dead", "publishes", "shards", *_LATER}
        return {key: value for key, value in shown.items() if key not in unused} | levels
    for name in ("last_version", *_LATER):
        del shown[name]
    return shown | {"grace": shown.pop("grace_period"), "lateness": staleness} | levels


@given(st.one_of(local_sgd(), hybrid()))
def test_a_description_is_read_back_from_both_formats(spec: MethodSpec) -> None:
    now, then = json.loads(json.dumps(spec.to_json())), json.loads(json.dumps(as_version_0_1(spec)))
    assert "options" in now and "options" not in then
    assert MethodSpec.from_json(now) == spec
    old = {key: value for key, value in spec.options.items() if key in MethodSpec.from_json(then).options}
    assert MethodSpec.from_json(then) == replace(spec, options=old, counts_in_rounds=False)
    assert set(spec.options) - set(old) <= {"look_ahead", "micro_batches"}


@given(local_sgd())
def test_the_server_reads_the_options_that_its_workers_sent(spec: MethodSpec) -> None:
    options = MethodSpec.from_json(as_version_0_1(spec)).local_sgd
    assert type(options) is methods.outer_rule(str(spec.options["outer"])).options
    assert options.model_dump(exclude={"shards"}) == spec.options


def test_a_description_of_version_0_1_has_the_options_of_every_rule() -> None:
    """As the first edition wrote it for ``outer sgd``."""
    flat: dict[str, Any] = {
        "method": "local_sgd",
        "outer": "sgd",
        "local_steps": 4,
        "outer_lr": 1.0,
        "outer_momentum": 0.9,
    }
    flat |= {
        "c": 0.0,
        "delay": 2,
        "buffer_size": 2,
        "dynamic_local_steps": False,
        "grace_period": None,
        "overlap": False,
    }
    flat |= {"staleness_power": 0.0, "staleness_limit": None, "delay_compensation": 0.0, "total_steps": 8, "seed": 1}
    flat |= {"workers": 2, "barrier": 0, "grace": None, "waits_for_dead": False, "publishes": False, "shards": [3, 4]}
    flat |= {"lateness": {"power": 0.0, "limit": None, "compensation": 0.0}, "worker_timeout": 60.0}
    spec = MethodSpec.from_json(flat)
    assert MethodSpec.from_json(flat | {"max_epoch": None}).max_epoch == spec.max_epoch == 0
    assert spec.local_sgd == OuterSGDOptions(local_steps=4, outer_lr=1.0, total_steps=8)
    assert spec.shards == [3, 4] and spec.server.worker_timeout == 60.0
    options = OuterSGDOptions(local_steps=4, outer_lr=1.0, total_steps=8)
    ours = as_version_0_1(local_sgd_spec(options, 2, [3, 4], None, {}))
    assert {key: flat[key] for key in ours if key in flat} == {key: ours[key] for key in ours if key in flat}
    assert set(flat) - set(ours) == {"outer_momentum", "c", "delay", "buffer_size"}, "of other rules"


@pytest.mark.parametrize(("outer", "delay"), [("delayed_nesterov", 3), ("buffered_nesterov", 5)])
def test_of_the_delays_of_every_rule_in_version_0_1_that_of_the_runs_own_rule_counts(outer: str, delay: int) -> None:
    options = methods.outer_rule(outer).options(outer=outer)
    flat = as_version_0_1(local_sgd_spec(options, 2, [], None, {})) | {"delay": 3, "buffer_size": 5}
    assert MethodSpec.from_json(flat).options["delay"] == delay


def test_steps_that_close_and_look_ahead_are_the_default_of_hybrid_and_a_barrier_has_neither() -> None:
    """In a description ``null`` is auto."""
    spec = MethodSpec.from_json(hybrid_spec(HybridOptions(), 3, None, {}, 0).to_json())
    assert (spec.closes_early, spec.barrier, spec.look_ahead, spec.grace_period) == (True, 3, None, None)
    words = HybridOptions.model_validate({"updates_per_step": "auto", "look_ahead": "auto"})
    assert words == HybridOptions() == spec.hybrid
    barrier = hybrid_spec(HybridOptions(barrier=True), 3, None, {}, 0)
    assert (barrier.closes_early, barrier.barrier, barrier.look_ahead) == (False, 3, 0.0)
    papers = HybridOptions.model_validate({"updates_per_step": 2, "look_ahead": "off"})
    fixed = hybrid_spec(papers, 3, None, {}, 0)
    assert (fixed.closes_early, fixed.barrier, fixed.look_ahead) == (False, 0, 0.0)
    assert HybridOptions.model_validate(yaml.safe_load("look_ahead: off")).look_ahead == 0.0, "YAML reads it as false"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"barrier": True, "look_ahead": 2}, "--look-ahead is for runs without --barrier: leave it out"),
        ({"updates_per_step": "all"}, r'"updates_per_step": must be auto or a whole number .* \(it is \'all\'\)'),
        ({"updates_per_step": "off"}, r"must be auto or a whole number of at least 1 \(it is 'off'\)"),
        ({"updates_per_step": True}, r"must be auto or a whole number of at least 1 \(it is True\)"),
        ({"look_ahead": "on"}, r'"look_ahead": must be auto, off or a number of at least 0 \(it is \'on\'\)'),
        ({"look_ahead": True}, r"must be auto, off or a number of at least 0 \(it is True\)"),
        ({"look_ahead": -1.0}, "look_ahead"),
        ({"look_ahead": math.inf}, "look_ahead"),
    ],
)
def test_options_of_hybrid_that_make_no_sense_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        methods.parse(HybridOptions, given, "here")


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("updates", [None, 2, 3])
def test_a_step_that_is_divided_by_speed_is_one_of_all_workers(barrier: bool, updates: int | None) -> None:
    options = HybridOptions(shares="auto", micro_batches=2, barrier=barrier, updates_per_step=updates)
    of_all = updates is None or barrier and updates == 3
    with nullcontext() if of_all else pytest.raises(ConfigurationError, match=f"--updates-per-step is {updates}"):
        options.for_workers(3)


@pytest.mark.parametrize("kind", ["closes early", "barrier", "local SGD"])
def test_a_description_as_long_as_another_has_its_length_and_its_table_of_rates(kind: str) -> None:
    def spec(steps: int) -> MethodSpec:
        framework: Any = {"learning_rates": [[0.1]] * steps}
        if kind == "local SGD":
            return local_sgd_spec(LocalSGDOptions(total_steps=steps), 3, [], None, framework)
        return hybrid_spec(HybridOptions(barrier=kind == "barrier"), 3, None, framework, steps)

    assert spec(7).total_steps == 7
    assert spec(7).as_long_as(spec(9)) == spec(9) != spec(7)


def test_defaults_that_depend_on_the_number_of_workers_are_numbers_in_the_description() -> None:
    assert hybrid_spec(HybridOptions(barrier=True), 3, None, {}, 0).hybrid.updates_per_step == 3
    assert hybrid_spec(HybridOptions(barrier=True), 3, None, {}, 0).barrier == 3
    for outer, option in (("delayed_nesterov", "delay"), ("buffered_nesterov", "delay")):
        options = methods.parse(LocalSGDOptions, {"outer": outer}, "test")
        assert local_sgd_spec(options, 5, [], None, {}).options[option] == 5


def test_a_synchronous_rule_and_a_grace_period_make_a_barrier_of_all_workers() -> None:
    assert local_sgd_spec(DiLoCoOptions(), 4, [], None, {}).barrier == 4
    waiting = methods.parse(LocalSGDOptions, {"grace_period": 2.0}, "test")
    assert local_sgd_spec(waiting, 4, [], None, {}).barrier == 4
    assert local_sgd_spec(waiting, 4, [], None, {}).grace_period == 2.0
    assert local_sgd_spec(OuterSGDOptions(), 4, [], None, {}).barrier == 0


def test_an_option_of_another_rule_is_refused_unless_it_is_off() -> None:
    off = {"outer": "diloco", "delay": None, "c": 0.0, "overlap": False, "grace_period": None}
    assert methods.parse(LocalSGDOptions, off, "here") == DiLoCoOptions()
    on = {"delay": 2, "c": 0.1, "overlap": True, "grace_period": 1.0, "staleness_power": -1.0}
    zeros = {"grace_period ": 0, "grace_period": 0.0, "staleness_limit": 0, "fragments": 0, "delay ": 0}
    for key, value in ((name.strip(), value) for name, value in (*on.items(), *zeros.items())):
        with pytest.raises(ConfigurationError, match=f'^here: "{key}" is of no use with "outer" diloco: leave it out$'):
            methods.parse(LocalSGDOptions, {"outer": "diloco", key: value}, "here")


def test_an_argument_in_pytorch_may_seed_the_rounding_of_compressed_updates() -> None:
    server, options = parse_options(LocalSGDOptions, {"seed": 7, "compress": "dqsgd"}, "AsyncLocalSGD")
    assert local_sgd_spec(options, 2, [], server, {}).options["seed"] == 7


def test_an_error_names_an_option_as_the_front_end_writes_it() -> None:
    said = []
    for spell in (as_flag, as_key, as_argument):
        spell_options(spell)
        with pytest.raises(ConfigurationError) as number:
            DelayedNesterovOptions(c=0.3).for_workers(4)
        with pytest.raises(ConfigurationError) as form:
            AdasumOptions(clip_delta=1.0).form_for("SGD", adaptive=False)
        said.append([str(error.value).split(" ")[0] for error in (number, form)])
    assert said == [["--c", "--adasum-clip-delta"], ['"c"', '"clip_delta"'], ["c=", "clip_delta="]]


def test_every_option_says_what_it_is() -> None:
    for method in methods.METHODS:
        for option in option_flags.options_of_method(method):
            assert option.description and not option.description.endswith("."), (method, option.name)
    assert all(option.description for option in option_flags.server_options(Section))


def test_the_tables_of_the_documents_are_made_from_the_options() -> None:
    found = 0
    for name in option_tables.DOCUMENTS:
        text = (option_tables.ROOT / name).read_text(encoding="utf-8")
        assert option_tables.updated(text) == text, f"{name}: run python scripts/option_tables.py --write"
        found += text.count("<!-- options: ")
    assert found == len(option_tables.TABLES)


@pytest.mark.parametrize("changed", ["| 51 |", "steps of"])
def test_a_table_that_was_changed_by_hand_is_seen(changed: str) -> None:
    text = (option_tables.ROOT / "docs/local_sgd.md").read_text(encoding="utf-8")
    other = text.replace("| 50 |", changed, 1) if "|" in changed else text.replace("steps H", changed, 1)
    assert other != text and option_tables.updated(other) == text


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="^outer rule diloco: there is a rule of this name already$"):
        register_outer_rule(OuterRule("diloco", DiLoCoOptions, lambda options, context: NotImplemented))


def test_an_option_with_the_name_of_one_of_the_servers_is_refused() -> None:
    class Options(DiLoCoOptions):
        server: str = ""

    with pytest.raises(ConfigurationError, match="^outer rule own: server is the name of an option that every method"):
        register_outer_rule(OuterRule("own", Options, lambda options, context: NotImplemented))
    assert "own" not in methods.outer_rules()


@pytest.mark.parametrize(
    ("method", "flags", "message"),
    [
        ("local_sgd", ["--outer", "adagrad"], "--optimizer local_sgd: --outer: Input should be 'diloco', "),
        ("local_sgd", ["--buffer-size", "2"], "--buffer-size is gone: give --delay"),
        (
            "hybrid_async",
            ["--shard-hosts=a:1"],
            "--shard-hosts is gone: give its addresses to --server-shards, as",
        ),
        ("hybrid_async", ["--grace-period", "1"], "--grace-period is gone: leave it out"),
        ("local_sgd", ["--server-shards", "0"], "--server-shards: give from 1 to 64 processes"),
        ("local_sgd", ["--overlap", "--grace-period", "1"], "--overlap and --grace-period do not go together"),
        ("local_sgd", ["--outer", "nesterov", "--c", "0.1"], "--c is of no use with --outer nesterov"),
        ("local_sgd", ["--local-steps", "none"], "--local-steps: Input should be a valid integer"),
        ("local_sgd", ["--outer-lr"], "argument --outer-lr: expected one argument"),
        (
            "local_sgd",
            ["--outer", "sgd", "--delay", "2"],
            "--optimizer local_sgd: --delay is of no use with --outer sgd: leave it out",
        ),
        (
            "local_sgd",
            ["--outer", "delayed_nesterov", "--c", "0.6"],
            "--c is 0.6: with --delay 2 it must be in [0, 1/2]",
        ),
        ("local_sgd", ["--outer", "mla", "--start-ahead", "ahead"], "--start-ahead: Input should be a valid boolean"),
        ("local_sgd", ["--outer", "sgd", "--start-ahead", "on"], "--start-ahead is of no use with --outer sgd: leave"),
        ("local_sgd", ["--worker-timeout", "0"], "--worker-timeout: Input should be greater than 0 (it is 0)"),
        (
            "hybrid_async",
            ["--updates-per-step", "3", "--barrier"],
            "--updates-per-step is 3: with --barrier there are only 2 workers",
        ),
        ("adasum", ["--adasum-form", "both"], "--adasum-form: Input should be 'gradient', 'delta' or 'auto'"),
        ("adascale", ["--adascale-interval", "0"], "--adascale-interval: Input should be greater than or equal to 1"),
    ],
)
def test_our_flags_in_a_workers_command_are_checked_without_fairseq(
    method: str, flags: list[str], message: str
) -> None:
    line = ["data", "--arch", "transformer", "--lr", "0.1", *flags]
    with pytest.raises(ConfigurationError) as caught:
        option_flags.check_command(method, line, workers=2)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "ahead"), [([], True), (["--start-ahead", "off"], False), (["--start-ahead", "on"], True)]
)
def test_look_ahead_is_switched_by_a_word(flags: list[str], ahead: bool) -> None:
    parser = ArgumentParser()
    option_flags.add_method_flags(parser, "local_sgd")
    args = parser.parse_args(["--outer", "heloco", *flags])
    assert option_flags.method_options(LocalSGDOptions, args, {}).model_dump()["start_ahead"] is ahead


SERVER_IN_SHARDS = ServerOptions(
    worker_timeout=7.0, snapshot_seconds=8.0, max_update_norm_ratio=9.0, server_shards="2,a:1,b:2", record=True
)
IN_SHARDS = ServerSettings(7.0, 8.0, 9.0, 2, "a:1,b:2", "cpu", True)


def test_the_description_of_a_hybrid_run_has_each_option_in_its_place() -> None:
    """No two numbers are equal."""
    options = HybridOptions(micro_batches=4, shares="auto", look_ahead=6.0, seed=11, total_steps=12)
    expected = MethodSpec(
        method="hybrid_async",
        workers=3,
        options=options.model_dump(exclude={"barrier", "total_steps"}),
        server=IN_SHARDS,
        framework={"clip_norm": 1.5},
        barrier=3,
        closes_early=True,
        look_ahead=6.0,
        waits_for_dead=False,
        micro_batches=4,
        whole_steps=13,
        max_epoch=5,
    )
    assert hybrid_spec(options, 3, SERVER_IN_SHARDS, {"clip_norm": 1.5}, 13, 5) == expected
    assert expected.server.hosts == ["a:1", "b:2"] and expected.server.shards == 4 and not expected.full_rounds
    barrier = HybridOptions(barrier=True, updates_per_step=2, micro_batches=4)
    fixed = hybrid_spec(barrier, 3, None, {}, 13, 5)
    assert fixed == MethodSpec(
        method="hybrid_async",
        workers=3,
        options=barrier.model_dump(exclude={"barrier", "total_steps"}),
        barrier=2,
        last_version=13,
        max_epoch=5,
    )
    assert fixed.full_rounds and fixed.total_steps == expected.total_steps == 13


def test_the_description_of_a_run_of_local_sgd_has_each_option_in_its_place() -> None:
    own = {"outer": "nesterov", "grace_period": 2.0, "staleness_power": -0.5, "staleness_limit": 4}
    options = methods.parse(LocalSGDOptions, own | {"delay_compensation": 0.25, "total_steps": 12}, "test")
    server = ServerOptions(worker_timeout=7.0)
    assert local_sgd_spec(options, 3, [8, 9], server, {"update_freq": [1]}, 5) == MethodSpec(
        method="local_sgd",
        workers=3,
        options=options.model_dump(exclude={"shards"}),
        server=ServerSettings(worker_timeout=7.0),
        framework={"update_freq": [1]},
        barrier=3,
        grace_period=2.0,
        counts_in_rounds=True,
        waits_for_dead=False,
        publishes=False,
        max_epoch=5,
        shards=[8, 9],
        staleness_power=-0.5,
        staleness_limit=4,
        delay_compensation=0.25,
    )


def test_a_global_servers_run_has_the_steps_of_all_regions_and_the_settings_of_its_regions_servers() -> None:
    given = "a:1,region=1,updates=6,merge=0.5,outer_lr=0.2,staleness_limit=9"
    region = methods.parse(LocalSGDOptions, {"upstream": given, "total_steps": 40, "local_steps": 5}, "test")
    spec = local_sgd_spec(region, 3, [], ServerOptions(worker_timeout=7.0), {})
    assert spec.upstream is not None
    above = global_spec(spec, spec.upstream, 2)
    rule = {"outer": "delayed_nesterov", "outer_lr": 0.2, "staleness_limit": 9}
    options = methods.parse(LocalSGDOptions, rule | {"total_steps": 120, "local_steps": 1 << 20}, "test")
    framework: dict[str, Any] = {"of_regions": True, "updates": 6, "merge": 0.5}
    server = ServerOptions(worker_timeout=7.0)
    assert above == replace(local_sgd_spec(options, 2, [], server, framework), waits_for_dead=True)
    assert above.of_regions and not spec.of_regions and above.workers == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"options": {"local_steps": 6, "seed": 1}}, "--local-steps"),
        ({"options": {"local_steps": 5, "seed": 2}}, "--seed"),
        ({"options": {"local_steps": 5, "seed": 1, "delay": 2}}, "--delay"),
        ({"server": ServerSettings(record=True)}, "--record"),
        ({"workers": 4}, "number of workers"),
        ({"shards": [4, 3]}, "training set"),
        ({"max_epoch": 3}, "number of epochs"),
        ({"last_version": 3}, "number of steps (total_steps, --max-update, max_steps of a Trainer)"),
        ({"framework": {"clip_norm": 2.0}}, "gradient clipping"),
        ({"framework": {"clip_norm": 1.0, "inner_optimizer": {}}}, "inner optimizer"),
        ({"framework": {"clip_norm": 1.0, "fused": True}}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_first_difference_between_two_descriptions_is_named_from_both_sides(
    change: dict[str, Any], said: str | None
) -> None:
    ours = MethodSpec("local_sgd", 3, {"local_steps": 5, "seed": 1}, framework={"clip_norm": 1.0}, shards=[3, 4])
    expected = None if said is None else f"{said} than the others"
    theirs = replace(ours, **change)
    assert (ours.difference(theirs), theirs.difference(ours)) == (expected, expected)


def test_a_fragments_turn_has_its_part_of_the_local_steps() -> None:
    options = methods.parse(LocalSGDOptions, {"fragments": 3, "local_steps": 12, "fragment_delay": 2}, "test")
    spec = local_sgd_spec(options, 2, [], None, {})
    turn = spec.of_a_fragment()
    changed = {"fragments": 1, "fragment_delay": 0, "local_steps": 4}
    assert (spec.fragments, turn.fragments) == (3, 1)
    assert turn == replace(spec, options=spec.options | changed)
    assert turn.of_a_fragment() is turn


def test_a_description_as_long_as_another_keeps_all_else() -> None:
    """Its rates are another's only where the lengths differ; seeds and clipping stay its own."""
    framework: dict[str, Any] = {"learning_rates": [[0.1]] * 7, "clip_norm": 1.0}
    ours = hybrid_spec(HybridOptions(seed=2), 3, None, framework, 7)
    other = hybrid_spec(HybridOptions(seed=3), 3, None, {"learning_rates": [[0.2]] * 9, "clip_norm": 2.0}, 9)
    expected = replace(ours, framework=framework | {"learning_rates": [[0.2]] * 9}, whole_steps=9)
    assert ours.as_long_as(other) == expected
    same = replace(other, whole_steps=7)
    assert ours.as_long_as(same) == ours


# One value of each option that excludes others; those of the method, and those of the server.
FEATURES: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "fragments": {"fragments": 2},
    "delay": {"fragment_delay": 1},
    "compress": {"compress": "topk"},
    "upstream": {"upstream": "a:1"},
    "buffers": {"buffers": "average"},
    "grace": {"grace_period": 2.0},
    "compensation": {"delay_compensation": 0.5},
    "power": {"staleness_power": -0.5},
    "diloco": {"outer": "diloco"},
}
OF_SERVER: dict[str, dict[str, Any]] = {
    "shards": {"server_shards": 2},
    "hosts": {"server_shards": "a:1"},
    "cuda": {"server_device": "cuda"},
    "record": {"record": True},
    "norm": {"max_update_norm_ratio": 5.0},
}
REFUSED = {
    "overlap": "fragments delay buffers grace diloco",
    "fragments": "upstream buffers compensation diloco hosts norm",
    "delay": "upstream buffers compensation diloco hosts norm",
    "compress": "buffers hosts",
    "upstream": "buffers hosts cuda",
    "buffers": "shards hosts",
    "grace": "diloco",
    "compensation": "diloco hosts",
    "power": "diloco hosts",
    "shards": "cuda",
    "hosts": "cuda",
    "cuda": "record",
}


def is_refused(*names: str) -> bool:
    own = {key: value for name in names for key, value in FEATURES.get(name, {}).items()}
    of_server = {key: value for name in names for key, value in OF_SERVER.get(name, {}).items()}
    try:
        local_sgd_spec(methods.parse(LocalSGDOptions, own, "test"), 2, [], ServerOptions(**of_server), {})
    except ConfigurationError:
        return True
    return False


def test_each_option_goes_with_every_other_but_those_that_exclude_it() -> None:
    every = [*FEATURES, *OF_SERVER]
    assert not any(map(is_refused, every))
    pairs = [pair for pair in combinations(every, 2) if pair != ("shards", "hosts")]  # values of one option
    expected = [(name, other) for name, others in REFUSED.items() for other in others.split()]
    assert [pair for pair in pairs if is_refused(*pair)] == expected


@pytest.mark.parametrize(
    ("given", "gradients", "found"),
    [
        ({}, 3, 3.0),
        ({"scale": 5.0}, 3, 5.0),
        ({"scale": 1.0}, 1, 1.0),
        ({"scale": 5.0, "interval": 2}, 3, 5.0),
        ({"scale": 5.0, "estimator": "differences"}, 1, 5.0),
        ({}, 1, "use several ranks or gradient accumulation"),
        ({"scale": 5.0}, 1, "use several ranks or gradient accumulation"),
        ({"scale": 5.0, "estimator": "differences"}, 2, "is for a step with one gradient, and this step has 2"),
        ({"scale": 5.0, "estimator": "differences", "interval": 2}, 1, "interval is for"),
        ({"estimator": "differences"}, 1, "needs .*scale"),
    ],
    ids=str,
)
def test_the_scale_of_adascale_is_given_or_the_number_of_gradients(
    given: dict[str, Any], gradients: int, found: float | str
) -> None:
    options = AdaScaleOptions(**given)
    if isinstance(found, float):
        assert options.scale_of(gradients) == found
    else:
        with pytest.raises(ConfigurationError, match=found):
            options.scale_of(gradients)


@pytest.mark.parametrize(
    ("given", "micro_batches", "workers", "divides"),
    [
        ({}, 2, 2, True),
        ({"updates_per_step": "auto", "look_ahead": 1}, 3, 2, True),
        ({"updates_per_step": None, "barrier": False}, 2, 3, True),
        ({}, 1, 2, False),
        ({}, 2, 1, False),
        ({"shares": "equal"}, 2, 2, False),
        ({"shares": "auto"}, 2, 2, False),  # it is given: there is no default
        ({"barrier": True}, 2, 2, False),
        ({"updates_per_step": 2}, 2, 2, False),
    ],
    ids=str,
)
def test_a_front_end_divides_micro_batches_where_a_step_closes_early_and_nothing_else_is_given(
    given: dict[str, Any], micro_batches: int, workers: int, divides: bool
) -> None:
    assert divides_by_default(given, micro_batches, workers) == divides


@pytest.mark.parametrize(
    ("given", "key"),
    [({"overlap": True}, "overlap"), ({"fragments": 2}, "fragments"), ({"fragment_delay": 2}, "fragment-delay")],
    ids=str,
)
def test_what_ranks_would_do_in_different_orders_is_for_workers_of_one_rank(given: dict[str, Any], key: str) -> None:
    options = methods.parse(LocalSGDOptions, given, "test")
    check_ranks(options, 1, "here")
    check_ranks(methods.parse(LocalSGDOptions, {"compress": "topk", "grace_period": 1.0}, "test"), 3, "here")
    for ranks in (2, 3):
        with pytest.raises(ConfigurationError, match=f"^here: --{key} is not supported in a worker of several ranks$"):
            check_ranks(options, ranks, "here")
