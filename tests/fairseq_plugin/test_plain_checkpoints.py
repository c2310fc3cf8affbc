"""What a checkpoint of ours holds, plain fairseq loads under torch's rule for files that nobody trusts."""

import io

import numpy as np
import torch
from fairseq.logging import metrics

from fairseq_async.fairseq_plugin.compat.checkpoints import plain_values
from tests.helpers.run_files import load_without_trust

COUNTS = np.array([79, 60, 42, 28])


def test_what_eval_bleu_has_counted_is_in_types_that_torch_loads_without_trust() -> None:
    """fairseq's meters hold arrays then; one that was loaded goes on counting."""
    with metrics.aggregate("of this test"):
        metrics.log_scalar("counts", COUNTS)
        metrics.log_scalar("length", np.int64(84))
    file = io.BytesIO()
    torch.save(plain_values({"metrics": metrics.state_dict()}), file)
    file.seek(0)
    loaded = load_without_trust(file)
    metrics.load_state_dict(loaded["metrics"])
    with metrics.aggregate("of this test"):
        metrics.log_scalar("counts", COUNTS)
    assert metrics.get_meter("of this test", "counts").sum.tolist() == (2 * COUNTS).tolist()
    assert metrics.get_meter("of this test", "length").sum == 84
    metrics.reset_meters("of this test")


def test_plain_values_have_the_structure_of_what_was_given() -> None:
    given = {"a": [(1, "x", {"b": np.float64(0.5)})], "t": torch.ones(2), "n": None}
    plain = plain_values(given)
    assert plain["a"] == [(1, "x", {"b": 0.5})] and type(plain["a"][0][2]["b"]) is float and plain["t"] is given["t"]
