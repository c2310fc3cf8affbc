"""Skips every test of this folder where torch sees no GPU."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest hands over all tests that it has collected, not those of this folder alone."""
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU; where there is one: bash scripts/gpu_check.sh"))
