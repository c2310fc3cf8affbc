"""Cases between processes."""

import pytest

from tests.helpers.rank_cases import run_cases


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each case of the module came to on each rank: nothing, or a traceback.

    Not of all modules at once: pytest's processes have different modules, and each of them would run all cases.
    """
    return run_cases(request.module.__name__, tmp_path_factory.mktemp("ranks"))
