"""The pictures of the README are of the logs that are kept, and show what the pages say of them."""

import json
from pathlib import Path

import pytest

from scripts.faults_picture import IMAGES, LOG, WORKERS
from scripts.loss_by_time import CURVES, draw, mean_curve


def test_the_curves_end_where_the_page_of_results_says(tmp_path: Path) -> None:
    synchronous, paper, default = (mean_curve(method, rate) for _, method, rate, _ in CURVES)
    assert synchronous[-1] == (1600.0, pytest.approx(5.248, abs=5e-4))  # 400 steps of the slow worker's 4 s
    assert paper[-1] == (640.0, pytest.approx(5.399, abs=5e-4)) and default[-1] == (
        640.5,
        pytest.approx(5.272, abs=5e-4),
    )
    assert [next(time for time, loss in synchronous if loss <= end) for _, end in (paper[-1], default[-1])] == [
        1200,
        1600,
    ]
    draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_the_picture_of_faults_is_of_a_run_that_went_on_after_both() -> None:
    lines = [json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()]
    killed = {each["killed"]: each["time"] for each in lines if "killed" in each}
    times = [[each["time"] for each in lines if each.get("worker") == worker] for worker in range(WORKERS)]
    back = min(time for time in times[1] if time > killed["worker 1"] + 1)
    for others in (times[0], times[2]):  # they went on in the meantime
        assert sum(killed["worker 1"] < time < back for time in others) > 20
    assert all(max(of_worker) > killed["server"] + 5 for of_worker in times)
    assert 10_000 < (IMAGES / "faults.gif").stat().st_size < 2_000_000 and (IMAGES / "faults.png").is_file()
