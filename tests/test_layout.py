"""The layout of the tests: who imports whom, and which folder belongs to which."""

import ast
import gc
from pathlib import Path

import pytest

from tests.helpers.commands import PACKAGE, ROOT
from tests.helpers.syntax import parsed, syntax_tree

TESTS = ROOT / "tests"
BESIDE_THE_PACKAGE = {"contract", "gpu", "helpers", "recipes"}  # folders of tests that mirror nothing in it


def imported(path: Path) -> set[str]:
    """The modules that a file imports, as ``package.module`` or ``package.module.name``."""
    found = set()
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {"." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def modules_named_in_strings(path: Path) -> set[str]:
    """As in ``[sys.executable, "-m", "tests.helpers.adding_worker"]``."""
    constants = (node for node in ast.walk(syntax_tree(path)) if isinstance(node, ast.Constant))
    return {node.value for node in constants if isinstance(node.value, str) and node.value.startswith("tests.")}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", sorted(TESTS.glob("**/*.py")), ids=relative)
def test_what_tests_share_is_in_helpers(path: Path) -> None:
    """No test module imports another, or a conftest."""
    names = imported(path)
    assert not [name for name in names if name.startswith(".")], "imports are absolute"
    of_tests = {name for name in names if name.split(".")[0] in ("tests", "conftest")}
    assert {name for name in of_tests if not name.startswith("tests.helpers.")} == set()


@pytest.mark.parametrize("folder", ["fairseq_async", "recipes", "scripts"])
def test_nothing_else_imports_tests(folder: str) -> None:
    paths = sorted((ROOT / folder).glob("**/*.py"))
    assert paths
    found = {relative(path): imported(path) | modules_named_in_strings(path) for path in paths}
    assert {path for path, names in found.items() if any(name.split(".")[0] == "tests" for name in names)} == set()


def test_each_folder_of_the_package_has_its_folder_of_tests() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    tested = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert "server" in folders and folders <= tested
    assert {path.parent.name for path in TESTS.glob("*/*.py")} <= folders | BESIDE_THE_PACKAGE


class Parses:
    """Garbage whose finalizer parses."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.parse("1")


def test_a_finalizer_that_parses_does_not_disturb_the_parsing_of_a_file() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    every = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(10):
            Parses()
            assert isinstance(parsed(source), ast.Module)
    finally:
        gc.set_threshold(*every)
    assert gc.isenabled()


def test_tests_parse_by_the_helper() -> None:
    """``ast.parse`` as it is has failed once in a full suite."""
    calls = [relative(path) for path in TESTS.glob("**/*.py") if "ast.parse(" in path.read_text(encoding="utf-8")]
    assert sorted(calls) == ["tests/helpers/syntax.py", "tests/test_layout.py"]
