"""Compressed updates in the simulator: fewer bytes on its links, and the same codecs as in a run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_async.errors import ConfigurationError
from fairseq_async.protocol.receipt import Status
from tests.helpers.simulations import DN, METHODS, experiment, run

LINK = {"workers": 2, "seconds_per_step": 1.0, "exchange": {"seconds_per_byte": 0.001}}


@pytest.mark.parametrize("method", [DN, METHODS["hybrid"]], ids=["local_sgd", "hybrid"])
def test_a_link_takes_as_long_as_the_payload_needs(tmp_path: Path, method: dict[str, Any]) -> None:
    plain, log = run(tmp_path, method, cluster=LINK)
    small, small_log = run(tmp_path, method | {"compress": "e3m0"}, cluster=LINK)
    size = plain.model.layout.size
    (first, _, report), (small_first, _, small_report) = log.events[0], small_log.events[0]
    assert report.bytes_sent == report.bytes_received == small_report.bytes_received == 4 * size
    # header and the size of the vector, length of a block, a scale for 256 values, half a byte for each
    assert small_report.bytes_sent == 32 + 4 + 4 * -(-size // 256) + -(-size // 2)
    assert first - small_first == pytest.approx(0.001 * (4 * size - small_report.bytes_sent))
    assert small.evaluate() == pytest.approx(plain.evaluate(), rel=0.2)


@pytest.mark.parametrize("method", [DN, METHODS["hybrid"]], ids=["local_sgd", "hybrid"])
@pytest.mark.parametrize(("codec", "bits"), [("bf16", 16), ("int8", 8)])
def test_parameters_that_workers_start_from_cost_the_bytes_of_their_payload(
    tmp_path: Path, method: dict[str, Any], codec: str, bits: int
) -> None:
    plain, log = run(tmp_path, method, cluster=LINK)
    small, small_log = run(tmp_path, method | {"compress": {"pull": codec}}, cluster=LINK)
    size = plain.model.layout.size
    (first, _, report), (small_first, _, small_report) = log.events[0], small_log.events[0]
    scales = 0 if codec == "bf16" else 4 + 4 * -(-size // 256)
    assert small_report.bytes_received == 32 + scales + bits // 8 * size and small_report.bytes_sent == 4 * size
    assert first - small_first == pytest.approx(0.001 * (4 * size - small_report.bytes_received))
    assert small_report.start_payload is not None and report.start_payload is None
    # the rounding is felt, and the run is much the same
    assert small.evaluate() != plain.evaluate() and small.evaluate() == pytest.approx(plain.evaluate(), rel=0.1)


def test_updates_that_are_dropped_go_back_into_the_residual(tmp_path: Path) -> None:
    method = {"method": "local_sgd", "outer": "sgd", "outer_lr": 0.3, "local_steps": 2, "staleness_limit": 0}
    cluster = {"workers": 3, "seconds_per_step": [1.0, 1.5, 4.0]}
    _, log = run(tmp_path, method | {"compress": "topk:chunk=8,keep=1"}, cluster=cluster)
    norms: dict[int, list[tuple[Status, float]]] = {}
    for _, receipt, report in log.events:
        norms.setdefault(receipt.worker, []).append((receipt.status, report.residual_norm or 0.0))
    slow = norms[2]
    assert slow[0] == (Status.STALE, 0.0) and slow[1][1] > 0.0  # all of it, before the second


@pytest.mark.parametrize(
    "options",
    [{"compress": "topk:chunk=8,keep=1,pull=e3m0"}, {"local_steps": 4, "fragments": 2, "fragment_delay": 1}],
    ids=["changes", "fragments"],
)
def test_a_worker_that_dies_begins_with_the_whole_model_and_no_residual(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    cluster = LINK | {"absences": [{"worker": 1, "from": 8.0, "to": 9.0}]}
    trial, log = run(tmp_path, DN | options, cluster=cluster)
    own = [report for _, receipt, report in log.events if receipt.worker == 1]
    whole = [report.bytes_received == own[0].bytes_received for report in own]
    assert whole.count(True) == 2 < len(own) and trial.finished
    assert not any(report.residual_norm for report, begins in zip(own, whole, strict=True) if begins)


def test_without_feedback_what_is_not_sent_is_lost(tmp_path: Path) -> None:
    """Of what the first updates have beyond the one value of eight that is sent, nothing comes with the second ones."""
    method = DN | {"compress": "topk:chunk=8,keep=1"}
    kept, log = run(tmp_path, method, cluster=LINK)
    lost, lost_log = run(tmp_path, method | {"error_feedback": False}, cluster=LINK)
    assert all(report.residual_norm is None for _, _, report in lost_log.events)
    assert all(report.residual_norm is not None for _, _, report in log.events)
    pairs = zip(log.events, lost_log.events, strict=True)
    same = [report.payload == other.payload for (*_, report), (*_, other) in pairs]
    assert same[:2] == [True, True] and not any(same[2:])
    assert not torch.equal(kept.parameters, lost.parameters)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"error_feedback": False}, '"error_feedback" is of no use here: no "compress" keeps a residual'),
        ({"error_feedback": False, "compress": "dqsgd"}, '"error_feedback" is of no use here'),
        ({"error_feedback": "no", "compress": "topk"}, "\"error_feedback\" is true or false (it is 'no')"),
    ],
)
def test_an_experiment_without_feedback_needs_a_codec_that_has_it(
    tmp_path: Path, method: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        experiment(tmp_path, methods={"it": DN | method})
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("compress", "said"),
    [
        ("int7", "there is no codec 'int7'; there are bf16, int8"),
        ("int8:block=0", "int8: block: Input should be greater than or equal to 1"),
        ("int8:keep=3", "int8: there is no parameter 'keep'; there are block"),
        ("topk:chunk=8,keep=9", "topk: keep is 9: a chunk has only 8 values"),
        ("adacomp:scale=bin,bin_size=20000", "adacomp: bin_size is 20000: with scale=bin it is at most 16384"),
        ({"both": "bf16"}, "'both' is not compressed; 'push' is"),
        ({"pull": "dqsgd"}, "pull is dqsgd: a worker needs all parameters; give bf16, int8 or e3m0"),
        ("pull=topk:keep=3", "pull is topk"),
        ("int8,pull=bf16,push=e3m0", "'push' or 'pull' is given twice"),
        ("int8:block=256,block=64", "int8: block is given twice"),
        ("int8:codec=topk", "int8: codec is given twice"),
        ({"push": 3}, "give the name of a codec"),
    ],
)
def test_a_codec_that_cannot_be_is_refused_in_one_line(tmp_path: Path, compress: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        experiment(tmp_path, methods={"it": DN | {"compress": compress}})
    assert "compress" in str(refused.value) and "\n" not in str(refused.value)
