"""An option has one name from its flag to its use, and a user."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from fairseq_async.method import methods
from fairseq_async.options.config import Section
from tests.helpers.commands import PACKAGE, ROOT
from tests.helpers.syntax import parsed, syntax_tree

OPTIONS = {
    name for method in methods.METHODS for model in methods.models(method).values() for name in model.model_fields
}
OPTIONS |= set(Section.model_fields)
GIVEN = ("options", "spec", "settings", "server", "filled")  # names of what has options
Signatures = dict[str, list[str]]


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE), syntax_tree(path)


def signatures() -> Signatures:
    """The parameters of each class of ours, but for algorithms, which have the names of the papers."""
    found: Signatures = {}
    for path, module in sources():
        for node in ast.walk(module) if path.parts[0] != "algorithms" else ():
            if isinstance(node, ast.ClassDef):
                inits = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
                fields = [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]  # type: ignore[union-attr]
                found[node.name] = [each.arg for each in inits[0].args.args[1:]] if inits else fields
    return found


def option_in(value: ast.expr) -> str | None:
    """The option that an expression takes as it is: ``options.local_steps``, ``spec.shards or None``."""
    if isinstance(value, ast.BoolOp):
        value = value.values[0]
    if isinstance(value, ast.Attribute) and value.attr in OPTIONS and ast.unparse(value.value).endswith(GIVEN):
        return value.attr
    return None


def renamed(module: ast.Module, classes: Signatures) -> Iterator[str]:
    """Each option that a class of ours is given under another name."""
    for call in ast.walk(module):
        if isinstance(call, ast.Call) and (name := ast.unparse(call.func).split(".")[-1]) in classes:
            pairs = [*zip(classes[name], call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
            for parameter, value in pairs:
                if (option := option_in(value)) and parameter not in (None, option):
                    yield f"{option} is {parameter} in {name}"


def test_no_option_is_renamed_on_its_way() -> None:
    classes = signatures()
    assert "local_steps" in classes["LocalStepPlan"] and "grace_period" in classes["MethodSpec"]
    assert [f"{path}: {each}" for path, module in sources() for each in renamed(module, classes)] == []


def test_a_renamed_option_would_be_seen() -> None:
    call = "Plan(spec.workers, options.local_steps, seconds=options.grace_period or 0.0, seed=options.seed)"
    found = list(renamed(parsed(call), {"Plan": ["workers", "most"]}))
    assert found == ["local_steps is most in Plan", "grace_period is seconds in Plan"]


def test_the_documents_say_when_to_set_each_option() -> None:
    text = (ROOT / "docs" / "local_sgd.md").read_text(encoding="utf-8").partition("### When to set an option")[2]
    rows = re.findall(r"^\| (`.*?`) \|", text.partition("\n## ")[0], re.MULTILINE)
    said = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    models = [
        Section,
        *(model for method in ("local_sgd", "hybrid_async") for model in methods.models(method).values()),
    ]
    assert sorted(said) == sorted({name for model in models for name in model.model_fields} - {"method"})
