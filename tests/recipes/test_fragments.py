"""The arithmetic of the benchmark of fragments."""

from scripts.bench.fragments_worker import peak


def test_the_peak_is_the_most_that_came_within_any_window() -> None:
    """50 bytes by 1.0 s, 200 between 1.0 and 1.5 s, 10 more by 3.0 s."""
    readings = [(0.0, 1000), (1.0, 1050), (1.5, 1250), (2.5, 1250), (3.0, 1260)]
    assert peak(readings, window=0.5) == 200 / 0.5
    assert peak(readings, window=1.5) == 250 / 1.5
    assert peak(readings[:1], window=1.0) == 0.0
