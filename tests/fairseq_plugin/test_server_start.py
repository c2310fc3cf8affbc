"""The server's process imports fairseq without what only classification needs."""

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json, sys
from fairseq_async.fairseq_server import _without_classification
with _without_classification():
    import fairseq.criterions.sentence_prediction, fairseq.optim, fairseq.tasks.audio_classification
left = [name for name in ("sklearn", "scipy", "deepspeed") if name in sys.modules]
import scipy.stats, sklearn.metrics
print(json.dumps([left, scipy.stats.pearsonr([1, 2, 4], [1, 2, 4])[0], sklearn.metrics.f1_score([1, 0], [1, 0])]))
"""


def test_what_the_server_does_not_need_is_not_imported_and_can_be_afterwards() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    left, correlation, score = json.loads(ran.stdout.splitlines()[-1])
    assert left == []
    assert correlation == pytest.approx(1.0) and score == 1.0
