"""The jobs of the synchronous methods, which run once for all tests."""

from pathlib import Path

import pytest

from tests.helpers.fairseq_jobs import Job, run_jobs


@pytest.fixture(scope="session")
def jobs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return run_jobs(data, tmp_path_factory.mktemp("jobs"))
