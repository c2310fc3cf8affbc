"""Cases between processes."""

import pytest

from tests.helpers.rank_cases import Cases, run_cases


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each case of the selected modules came to on each rank: nothing, or a traceback."""
    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    named = sorted(module.__name__ for module in modules if isinstance(getattr(module, "CASES", None), Cases))
    return run_cases(named, tmp_path_factory.mktemp("ranks"))
