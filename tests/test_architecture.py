"""The structure that docs/architecture.md describes: layers, imports, sizes, types."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from tests.helpers.syntax import syntax_tree

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fairseq_async"
INTERFACES = {"fairseq_plugin", "deepspeed_plugin", "pytorch", "launch"}
# from the lowest: a module imports from lower layers, and from its own
LAYERS = [
    {"errors", "environment"},
    {"algorithms"},
    {"exchange"},
    {"options"},
    {"method"},
    {"protocol"},
    {"collective"},
    {"records"},
    {"server"},
    {"worker"},
    {"regions"},
    INTERFACES,
    {"simulation", "replay", "reporting", "export"},
    {"cli"},
    {"__main__"},
]
FRONT_ENDS = set().union(*LAYERS[LAYERS.index(INTERFACES) :])


def modules() -> dict[str, Path]:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


tree = cache(syntax_tree)


def layer(module: str) -> int | None:
    """The number of a module's layer; None for the package itself."""
    parts = module.split(".")
    if len(parts) == 1:
        return None
    return next(number for number, names in enumerate(LAYERS) if parts[1] in names)


def imports(node: ast.AST, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """The package's modules that are imported somewhere in a tree, but for types alone, with their lines."""
    types_only = {
        id(inner)
        for each in ast.walk(node)
        if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.dump(each.test)
        for inner in ast.walk(each)
    }
    for each in ast.walk(node):
        if id(each) in types_only:
            continue
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("fairseq_async"):
            for name in each.names:
                yield (
                    (f"{each.module}.{name.name}" if f"{each.module}.{name.name}" in known else str(each.module)),
                    each.lineno,
                )
        elif isinstance(each, ast.Import):
            for name in each.names:
                if name.name in known:
                    yield name.name, each.lineno


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_each_layer_imports_only_from_those_below() -> None:
    known = modules()
    upward = [
        f"{module} imports {imported}"
        for module, path in known.items()
        for imported, _ in imports(tree(path), known)
        if layer(module) is not None and layer(imported) is not None and layer(imported) > layer(module)  # type: ignore[operator]
    ]
    assert not upward, "\n".join(upward)


def test_the_worker_knows_the_protocol_and_no_server() -> None:
    known = modules()
    found = [
        f"{module} imports {imported}"
        for module, path in known.items()
        for imported, _ in imports(tree(path), known)
        if module.startswith("fairseq_async.worker") and imported.startswith("fairseq_async.server")
    ]
    assert not found, "\n".join(found)


def test_names_that_users_import_are_those_modules_themselves() -> None:
    for public, module in {"torch": "pytorch", "config": "options.config", "methods": "method.methods"}.items():
        assert import_module(f"fairseq_async.{public}") is import_module(f"fairseq_async.{module}")
    assert import_module("fairseq_async.torch.hybrid") is import_module("fairseq_async.pytorch.hybrid")
    assert import_module("fairseq_async.pytorch").__spec__.name == "fairseq_async.pytorch"


def test_no_imports_go_in_a_cycle() -> None:
    known = modules()
    graph = {module: {name for name, _ in imports(tree(path), known)} - {module} for module, path in known.items()}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*way, module))
            done.add(module)

    for module in sorted(graph):
        # the package's own __init__ registers the fairseq plugin when fairseq imports it as its --user-dir
        if module != "fairseq_async":
            visit(module, ())


def test_an_import_inside_a_function_says_why() -> None:
    silent = []
    for path in modules().values():
        lines = path.read_text(encoding="utf-8").splitlines()
        for function in functions(path):
            first: ast.AST | None = None
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom) and (first is None or node.lineno < first.lineno):  # type: ignore[attr-defined]
                    first = node
            if first is not None:
                near = "\n".join(lines[first.lineno - 3 : first.end_lineno])  # type: ignore[attr-defined]
                if not re.search(r"#(?! (noqa|type: ignore))", near):
                    silent.append(f"{path.relative_to(ROOT)}:{first.lineno} {function.name}")  # type: ignore[attr-defined]
    assert not silent, "\n".join(silent)


def test_no_lower_layer_names_a_higher_one_or_its_flags_in_a_string() -> None:
    found = []
    for module, path in modules().items():
        number = layer(module)
        if number is None or number >= LAYERS.index(INTERFACES):
            continue
        documented = {id(each) for each in _docstrings(tree(path))}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                named = any(f"fairseq_async.{name}" in node.value for name in FRONT_ENDS)
                flag = re.search(r"(^|[^\w-])--(?!shm-size)[a-z]", node.value)
                # those that make flags of options, and a server's own command line
                spells = module.split(".")[1] in {"options", "method"}
                spells |= module.endswith((".server_process", ".programs.program"))
                if named or (flag and not spells):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}")
    assert not found, "\n".join(found)


def _docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    for each in ast.walk(node):
        body = getattr(each, "body", None)
        if isinstance(body, list):
            for statement in body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    yield statement.value


def test_the_wall_clock_decides_nothing() -> None:
    """It may jump. Logs and certificates have it."""
    shown = {"server.service", "launch.certificates", "fairseq_plugin.validations"}
    wall = ("time.time", "time.time_ns", "datetime.datetime.now")
    users = {
        module
        for module, path in modules().items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in wall
    }
    assert users == {f"fairseq_async.{module}" for module in shown}


def test_no_folder_has_more_than_sixteen_files() -> None:
    folders = Counter(path.parent for path in PACKAGE.rglob("*.py"))
    assert max(folders.values()) <= 16, folders.most_common(1)


def test_functions_and_files_are_short() -> None:
    lengths = {}
    for path in modules().values():
        for function in functions(path):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            lengths[f"{path.relative_to(ROOT)}:{function.name}"] = (
                (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
            )
    assert max(lengths.values()) <= 50, max(lengths, key=lengths.__getitem__)
    assert sorted(lengths.values())[len(lengths) // 2] <= 5
    long = [str(path) for path in modules().values() if len(path.read_text().splitlines()) > 400]
    assert not long


def test_the_type_any_is_rare() -> None:
    texts = [path.read_text(encoding="utf-8") for path in modules().values()]
    anys, lines = sum(len(re.findall(r"\bAny\b", text)) for text in texts), sum(text.count("\n") for text in texts)
    assert 1000 * anys / lines <= 12


@pytest.mark.parametrize("kind", ["module", "class", "function"])
def test_what_is_public_has_a_docstring(kind: str) -> None:
    missing = []
    for path in modules().values():
        if kind == "module" and path.read_text().strip() and not ast.get_docstring(tree(path)):
            missing.append(str(path))
        for node in tree(path).body:
            public = isinstance(
                node, ast.ClassDef if kind == "class" else ast.FunctionDef
            ) and not node.name.startswith("_")  # type: ignore[union-attr]
            if kind != "module" and public and not ast.get_docstring(node):  # type: ignore[arg-type]
                missing.append(f"{path.relative_to(ROOT)}: {node.name}")  # type: ignore[union-attr]
    assert not missing, "\n".join(missing)
