"""The server's optimizer and schedule against fairseq's own, in one process."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq import options, utils
from fairseq.data import FairseqDataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim import build_optimizer
from fairseq.optim.adam import Adam, FairseqAdam
from fairseq.optim.lr_scheduler import build_lr_scheduler

import fairseq_async.fairseq_plugin  # noqa: F401
from fairseq_async.algorithms import Update
from fairseq_async.errors import ConfigurationError
from fairseq_async.fairseq_plugin.compat.muon import divide_for_muon
from fairseq_async.fairseq_plugin.compat.optimizers import FusedAdam
from fairseq_async.fairseq_plugin.flags import check_cut, cut_batches, describe_hybrid
from fairseq_async.fairseq_plugin.server import build
from fairseq_async.method.option_flags import check_inner_optimizer
from fairseq_async.method.spec import JsonObject, MethodSpec
from fairseq_async.protocol import Layout
from fairseq_async.server import resume

ONE_TENSOR = Layout.of([("t", torch.zeros(2))]), torch.zeros(2)
SHAPES = [(5, 8), (8,), (3, 5, 2), (1,)]
BASE = ["data", "--task", "translation", "--arch", "transformer", "--max-tokens", "100", "--clip-norm", "0.5"]


def parse(monkeypatch: pytest.MonkeyPatch, *flags: str) -> Any:
    arguments = [*BASE, *flags]
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *arguments])
    args = options.parse_args_and_arch(options.get_training_parser(), arguments)
    return convert_namespace_to_omegaconf(args)


def spec_of(monkeypatch: pytest.MonkeyPatch, *flags: str, workers: int = 1) -> MethodSpec:
    cfg = parse(monkeypatch, "--optimizer", "hybrid_async", *flags)
    described = describe_hybrid(cfg.optimizer, cfg, workers)
    return MethodSpec.from_json(json.loads(json.dumps(described.to_json())))  # as it comes over the wire


def with_options(spec: MethodSpec, changes: JsonObject) -> MethodSpec:
    """The same method with other options of the inner optimizer."""
    inner = spec.framework["inner_optimizer"]
    assert isinstance(inner, dict)
    return replace(spec, framework=spec.framework | {"inner_optimizer": inner | changes})


def check_equal_steps(
    monkeypatch: pytest.MonkeyPatch, inner: list[str], schedule: list[str], fused: bool = False
) -> list[float]:
    """30 steps over three epochs with the same gradients on both sides, of which some are missing; returns the learning
    rates."""
    spec = spec_of(monkeypatch, "--inner-optimizer", *inner, *schedule)
    assert spec.framework["fused"] is False, "these processes have no GPU"
    spec = replace(spec, framework=spec.framework | {"fused": fused})
    cfg = parse(monkeypatch, "--optimizer", *inner, *schedule)
    torch.manual_seed(0)
    flat = torch.randn(sum(torch.Size(s).numel() for s in SHAPES))
    layout = Layout.of([(f"t{i}", torch.zeros(s)) for i, s in enumerate(SHAPES)])
    theirs = [torch.nn.Parameter(view.clone()) for view in layout.views(flat)]
    divide_for_muon((f"t{i}", each) for i, each in enumerate(theirs))
    optimizer = build_optimizer(cfg.optimizer, theirs)
    scheduler = build_lr_scheduler(cfg.lr_scheduler, optimizer)
    scheduler.step_update(0)
    ours, _ = build(spec, layout, flat)
    rates = []
    for epoch in range(1, 4):
        scheduler.step_begin_epoch(epoch)
        scheduler.step_update((epoch - 1) * 10)
        ours.begin_epoch(epoch)
        for step in range((epoch - 1) * 10, epoch * 10):
            gradient = torch.randn_like(flat)
            missing = [0, 0, 0b0010, 0b1101, 0b0011][step % 5]
            for number, view in enumerate(layout.views(gradient)):
                theirs[number].grad = None if missing >> number & 1 else view.clone()
            utils.clip_grad_norm_(theirs, 0.5)
            rates.append(optimizer.get_lr())
            assert ours.learning_rate == pytest.approx(optimizer.get_lr(), rel=0, abs=0)
            optimizer.step()
            scheduler.step_update(step + 1)
            assert ours.apply(flat, Update(0, step, step, 7.0, gradient, missing=missing))
            for a, b in zip(theirs, layout.views(flat), strict=True):
                assert (a - b).norm() <= 1e-6 * a.norm() if fused else torch.equal(a, b)
        scheduler.step(epoch, 5.0)
        scheduler.step_update(epoch * 10)
        ours.end_epoch(epoch, 5.0)
    return rates


@pytest.mark.parametrize(
    "inner",
    [
        ["adam", "--adam-betas", "(0.9, 0.98)", "--weight-decay", "0.01"],
        ["adam", "--adam-betas", "[0.8, 0.9]", "--adam-eps", "1e-6"],
        ["sgd", "--momentum", "0.9", "--weight-decay", "0.1"],
        ["nag", "--momentum", "0.9"],
        ["adagrad"],
        ["adadelta"],
        ["adamax"],
        ["adafactor", "--scale-parameter"],
        ["muon", "--muon-betas", "(0.8, 0.9)", "--muon-momentum", "0.8", "--weight-decay", "0.1"],
    ],
    ids=lambda inner: inner[0],
)
def test_every_inner_optimizer_steps_in_the_server_as_in_fairseq(
    monkeypatch: pytest.MonkeyPatch, inner: list[str]
) -> None:
    check_equal_steps(monkeypatch, inner, ["--lr", "0.1", "--lr-scheduler", "fixed"])


def test_muon_without_names_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the flat fp32 copies of a worker in fp16, or of a plain run; the synchronous methods do not offer it."""
    cfg = parse(monkeypatch, "--optimizer", "muon")
    with pytest.raises(ConfigurationError, match="leave out --fp16 and --bf16 with local_sgd, and --optimizer muon"):
        build_optimizer(cfg.optimizer, [torch.nn.Parameter(torch.zeros(2, 2))])
    for method in ("adasum", "adascale"):
        with pytest.raises(ConfigurationError, match=f"--inner-optimizer muon: {method} has "):
            check_inner_optimizer(method, "muon", ["muon", "adam", "sgd"])
    check_inner_optimizer("local_sgd", "muon", ["adam"])  # before fairseq has imported the plug-in


@pytest.mark.parametrize(("flags", "kind"), [([], FusedAdam), (["--use-old-adam"], Adam)])
def test_with_gpus_the_server_has_a_fused_adam_unless_the_old_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], kind: type
) -> None:
    inner = ["adam", "--adam-betas", "(0.9, 0.98)", "--weight-decay", "0.1", "--adam-eps", "1e-3", *flags]
    check_equal_steps(monkeypatch, inner, ["--lr", "0.1", "--lr-scheduler", "fixed"], fused=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = spec_of(monkeypatch, "--inner-optimizer", *inner)
    monkeypatch.undo()
    rule, _ = build(spec, *ONE_TENSOR)
    assert spec.framework["fused"] is True and type(rule.optimizer) is kind


@pytest.mark.parametrize(
    "schedule",
    [
        ["fixed", "--lr", "0.1,0.2", "--force-anneal", "2"],
        ["fixed", "--lr", "0.1", "--warmup-updates", "7"],
        ["inverse_sqrt", "--lr", "0.1", "--warmup-updates", "7"],
        ["cosine", "--lr", "0.1", "--warmup-updates", "5", "--max-update", "30"],
        ["polynomial_decay", "--lr", "0.1", "--total-num-update", "30", "--warmup-updates", "3"],
        ["reduce_lr_on_plateau", "--lr", "0.1", "--lr-shrink", "0.5"],
        ["step", "--lr", "0.1", "--lr-deacy-period", "10"],
        ["tri_stage", "--lr", "0.1", "--warmup-steps", "5", "--hold-steps", "5", "--decay-steps", "20"],
        ["triangular", "--lr", "0.01", "--max-lr", "0.1", "--lr-period-updates", "8"],
        ["manual", "--lr", "0.1", "--epoch2lr", "{'1': 0.1, '2-3': 0.01}"],
    ],
    ids=lambda schedule: schedule[0],
)
def test_every_schedule_counts_the_steps_of_the_server(monkeypatch: pytest.MonkeyPatch, schedule: list[str]) -> None:
    rates = check_equal_steps(monkeypatch, ["sgd"], ["--lr-scheduler", *schedule])
    assert len(set(rates)) > 1, "the schedule was meant to do something"


def test_a_rule_goes_on_from_its_state_with_moments_schedule_and_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--inner-optimizer", "adam", "--updates-per-step", "2", "--lr", "0.1", "--lr-scheduler", "inverse_sqrt"]
    spec = spec_of(monkeypatch, *flags, "--warmup-updates", "4")
    layout = Layout.of([("t", torch.zeros(6))])
    torch.manual_seed(0)
    sent = [Update(0, i, 0, float(i + 1), torch.randn(6)) for i in range(10)]
    straight, first = torch.ones(6), torch.ones(6)
    whole, part = build(spec, layout, straight)[0], build(spec, layout, first)[0]
    for update in sent:
        whole.apply(straight, update)
    for update in sent[:5]:
        part.apply(first, update)
    second = first.clone()
    resumed = build(spec, layout, second)[0]
    resumed.load_state_dict(part.state_dict())
    for update in sent[5:]:
        resumed.apply(second, update)
    assert torch.equal(straight, second) and whole.learning_rate == resumed.learning_rate


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--updates-per-step", "0"],
            "--optimizer hybrid_async: --updates-per-step: Input should be greater than or equal to 1 (it is 0)",
        ),
        (["--updates-per-step", "5", "--barrier"], "--updates-per-step is 5: with --barrier there are only 2 workers"),
        (["--ddp-backend", "slowmo"], "--ddp-backend slowmo: not possible with --optimizer hybrid_async"),
        (["--ddp-backend", "fully_sharded"], "--ddp-backend fully_sharded: not possible with --optimizer hybrid_async"),
        (["--zero-sharding", "os"], "--zero-sharding os"),
        (["--use-bmuf"], "--use-bmuf"),
        (["--amp"], "--amp"),
        (["--store-ema"], "--store-ema"),
        (["--quantization-config-path", "pq.yaml"], "--quantization-config-path: not possible"),
        (["--quant-noise-pq", "0.1"], "--quant-noise-pq: not possible"),
        (["--shares", "auto"], "--shares is auto: give --update-freq of at least 2"),
        (["--shares", "auto", "--update-freq", "2,4"], "--update-freq 2,4: with --shares auto a step is always"),
        (["--shares", "auto", "--skip-remainder-batch"], "--skip-remainder-batch: not possible with --shares auto"),
        (["--lr-scheduler", "pass_through"], "--lr-scheduler pass_through"),
        (["--optimizer-overrides", "weight_decay=0"], "--optimizer-overrides weight_decay=0: write it as in '{"),
        (["--optimizer-overrides", "{1, 2}"], "--optimizer-overrides {1, 2}: write it as in '{"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        spec_of(monkeypatch, *flags, workers=2)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "workers", "average"),
    [
        (["--update-freq", "4"], 2, 4),
        (["--update-freq", "4", "--shares", "equal"], 2, 0),
        (["--update-freq", "4", "--barrier"], 2, 0),
        (["--update-freq", "4", "--updates-per-step", "2"], 2, 0),
        (["--update-freq", "2,4"], 2, 0),
        (["--update-freq", "4", "--skip-remainder-batch"], 2, 0),
        (["--update-freq", "4"], 1, 0),
        ([], 2, 0),
    ],
)
def test_steps_of_several_batches_are_divided_by_speed_where_they_can_be(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], workers: int, average: int
) -> None:
    """And nobody has said otherwise; a run with a barrier is to be the same each time."""
    assert spec_of(monkeypatch, *flags, workers=workers).micro_batches == average


def test_batches_that_are_cut_are_the_small_ones_of_fairseqs_own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = parse(
        monkeypatch, "--optimizer", "hybrid_async", "--update-freq", "2,3", "--batch-size", "9", "--micro-batches", "4"
    )
    cut_batches(cut.optimizer, cut)
    plain = ["--update-freq", "8,12", "--batch-size", "2", "--max-tokens", "25"]
    limits = ["--batch-size-valid", "9", "--max-tokens-valid", "100"]  # a validation's batches stay as they were
    expected = parse(monkeypatch, "--optimizer", "hybrid_async", *plain, *limits)
    assert (cut.dataset, cut.optimization) == (expected.dataset, expected.optimization)


@pytest.mark.parametrize(
    ("parts", "flags", "most"),
    [("0", [], "--max-tokens, 100"), ("101", [], "--max-tokens, 100"), ("9", ["--batch-size", "8"], "--batch-size, 8")],
)
def test_more_micro_batches_than_a_batch_has_tokens_or_sentences_are_one_line(
    monkeypatch: pytest.MonkeyPatch, parts: str, flags: list[str], most: str
) -> None:
    cfg = parse(monkeypatch, "--optimizer", "hybrid_async", *flags, "--micro-batches", parts)
    with pytest.raises(ConfigurationError, match=f"--micro-batches {parts}: give .* at least 1 and at most {most}$"):
        cut_batches(cfg.optimizer, cfg)


class Samples(FairseqDataset):
    """The last is too long for whole batches too. fairseq's data of several languages has no ``num_tokens_vec``."""

    lengths = np.array([7, 26, 25, 45, 101])

    def __len__(self) -> int:
        return len(self.lengths)

    def num_tokens(self, index: int) -> int:
        return int(self.lengths[index])


class CountedAtOnce(Samples):
    def num_tokens_vec(self, indices: Any) -> Any:
        return self.lengths[indices]


@pytest.mark.parametrize("kind", [Samples, CountedAtOnce])
def test_samples_that_are_left_out_of_batches_that_are_cut_are_one_line(
    monkeypatch: pytest.MonkeyPatch, kind: type[Samples]
) -> None:
    cfg = parse(monkeypatch, "--optimizer", "hybrid_async", "--micro-batches", "4")
    cut_batches(cfg.optimizer, cfg)
    with pytest.raises(ConfigurationError, match="4: 2 of .*, the longest of 45 .* batches of 25; give at most 2$"):
        check_cut(cfg.optimizer, cfg, kind())
    for parts in ("1", "2"):
        cfg = parse(monkeypatch, "--optimizer", "hybrid_async", "--micro-batches", parts)
        cut_batches(cfg.optimizer, cfg)
        check_cut(cfg.optimizer, cfg, kind())


def test_the_server_is_told_of_the_overrides_of_its_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    given = spec_of(monkeypatch, "--optimizer-overrides", "{'betas': (0.5, 0.9)}").framework
    assert given["optimizer_overrides"] == {"betas": [0.5, 0.9]}
    assert "optimizer_overrides" not in spec_of(monkeypatch).framework


def test_overrides_hold_for_the_optimizer_of_each_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(monkeypatch, "--optimizer-overrides", "{'weight_decay': 0.5}")
    first, second = ({"optimizer": {"param_groups": [{"weight_decay": 0.0, "lr": 1.0}]}} for _ in range(2))
    resume._with_overrides({"server": {"rule": first | {"shards": [second]}}}, spec)
    assert [part["optimizer"]["param_groups"][0]["weight_decay"] for part in (first, second)] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--inner-optimizer", "adem"], "--inner-optimizer adem: hybrid_async has adadelta, adafactor"),
        (["--inner-optimizer", "hybrid_async"], "--inner-optimizer hybrid_async"),
        (
            ["--distributed-world-size", "2"],
            "--distributed-world-size is 2: that many ranks of this worker were not started",
        ),
        (["--distributed-init-method", "tcp://127.0.0.1:1"], "--distributed-init-method: is for processes that wait"),
    ],
)
def test_flags_that_fairseq_would_act_upon_first_are_refused_while_it_parses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(monkeypatch, "--optimizer", "hybrid_async", *flags)
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count("\n") == 1


def test_a_configuration_that_fairseq_does_not_take_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(monkeypatch, "--inner-optimizer", "adam")
    with pytest.raises(ConfigurationError, match="--inner-optimizer adam") as caught:
        build(with_options(spec, {"adam_betas": [2.0]}), *ONE_TENSOR)
    assert "\n" not in str(caught.value)


def test_an_assertion_of_fairseqs_without_a_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(monkeypatch, "--lr-scheduler", "tri_stage", "--phase-ratio", "[0.2,0.3,0.5]", "--max-epoch", "3")
    with pytest.raises(ConfigurationError, match=r"with --lr-scheduler tri_stage: assert cfg\.max_update > 0$"):
        build(spec, *ONE_TENSOR)


def test_a_schedule_of_the_users_own_is_named_with_those_that_the_server_has(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(monkeypatch, "--inner-optimizer", "adam")
    own = replace(spec, framework=spec.framework | {"lr_scheduler": {"_name": "mine"}})
    with pytest.raises(ConfigurationError, match="--lr-scheduler mine: the server.* has cosine, fixed, .*local_sgd"):
        build(own, *ONE_TENSOR)


def test_an_optimizer_that_does_more_than_its_torch_optimizers_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plug-in: the server would leave out what its step() does beside."""
    monkeypatch.setattr(FairseqAdam, "step", lambda self, closure=None, scale=1.0, groups=None: None)
    with pytest.raises(ConfigurationError, match="--inner-optimizer adam.*it has a step.. of its own: .*local_sgd"):
        build(spec_of(monkeypatch, "--inner-optimizer", "adam"), *ONE_TENSOR)


def test_a_step_of_no_updates_is_refused_by_the_server_too(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(monkeypatch, "--inner-optimizer", "adam")
    empty = replace(spec, options=spec.options | {"updates_per_step": 0})
    with pytest.raises(ConfigurationError, match=r"updates_per_step.* \(it is 0\)"):
        build(empty, Layout.of([("t", torch.zeros(2))]), torch.zeros(2))


@pytest.mark.parametrize(
    ("inner", "option"),
    [("adam", "adam_betas"), ("adamax", "adamax_betas"), ("adafactor", "adafactor_eps")],
)
def test_code_in_place_of_a_pair_of_numbers_is_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inner: str, option: str
) -> None:
    """fairseq evaluates these strings; a worker with the token could open any file of the server's user by one."""
    spec = spec_of(monkeypatch, "--inner-optimizer", inner)
    code = f"open({str(tmp_path / 'trace')!r}, 'w') and (0.9, 0.9)"
    with pytest.raises(ConfigurationError, match=f"--inner-optimizer {inner}"):
        build(with_options(spec, {option: code}), *ONE_TENSOR)
    assert not (tmp_path / "trace").exists()


def test_code_in_an_optimizer_within_another_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'trace')!r}, 'w') and (0.9, 0.9)"
    group = {"optimizer": {"_name": "adam", "lr": [0.1], "adam_betas": code}}
    spec = spec_of(monkeypatch, "--inner-optimizer", "adam")
    with pytest.raises(ConfigurationError, match="--inner-optimizer composite: hybrid_async has adadelta"):
        build(with_options(spec, {"_name": "composite", "groups": {"default": group}}), *ONE_TENSOR)
    with pytest.raises(ConfigurationError, match="groups is no plain value"):
        build(with_options(spec, {"groups": {"default": group}}), *ONE_TENSOR)
    assert not (tmp_path / "trace").exists()


def test_a_variable_of_the_servers_environment_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cr3t")
    spec = spec_of(monkeypatch, "--inner-optimizer", "adam")
    with pytest.raises(ConfigurationError, match="weight_decay is no plain value") as caught:
        build(with_options(spec, {"weight_decay": "${oc.env:SECRET}"}), *ONE_TENSOR)
    assert "s3cr3t" not in str(caught.value)


def test_a_schedule_that_follows_losses_knows_the_best_of_them_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of 2, 3 and 2.5: the rate is halved by the second and, against the first, by the third."""
    schedule = ["--lr-scheduler", "reduce_lr_on_plateau", "--lr", "1.0", "--lr-shrink", "0.5"]
    spec = spec_of(monkeypatch, "--inner-optimizer", "sgd", *schedule, "--clip-norm", "0")
    (layout, _), parameters = ONE_TENSOR, torch.zeros(2)
    before, _ = build(spec, layout, parameters)
    before.end_epoch(1, 2.0)
    before.end_epoch(2, 3.0)
    assert before.learning_rate == 0.5
    after, _ = build(spec, layout, parameters)
    after.load_state_dict(before.state_dict())
    assert after.learning_rate == 0.5
    after.end_epoch(3, 2.5)
    assert after.learning_rate == 0.25
    after.apply(parameters, Update(0, 0, 0, 1.0, torch.ones(2)))
    assert parameters.tolist() == [-0.25] * 2
