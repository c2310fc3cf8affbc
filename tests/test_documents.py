"""The documents name what exists: files, tests, classes, and headings that a link leads to."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.documents import ALL

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fairseq_async"
OF_THE_CODE = ("docs/methods.md", "docs/architecture.md", "CONTRIBUTING.md")  # these name files and classes


@cache
def text_of(name: str) -> str:
    """A document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def in_backticks(name: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text_of(name))


@cache
def sources() -> str:
    return "\n".join(
        path.read_text(encoding="utf-8")
        for path in [*sorted(PACKAGE.rglob("*.py")), *(ROOT / "recipes" / "rules").glob("*.py")]
    )


def is_class(name: str) -> bool:
    """Or a union of classes that has a name."""
    return re.search(rf"^(class {name}\b|{name} = )", sources(), re.MULTILINE) is not None


def has_member(owner: str, member: str) -> bool:
    """Whether a class of this name has such a method in its body."""
    bodies = re.findall(rf"^class {owner}\b.*?(?=^\S|\Z)", sources(), re.DOTALL | re.MULTILINE)
    return any(re.search(rf"^    def {member}\(", body, re.MULTILINE) for body in bodies)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.lower())
    return re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")


def anchors(path: Path) -> set[str]:
    text = text_of(str(path.relative_to(ROOT)))
    return {slug(found) for found in re.findall(r"^#+ (.*)$", text, re.MULTILINE)} | set(
        re.findall(r'<a id="([^"]+)">', text)
    )


@pytest.mark.parametrize("name", OF_THE_CODE)
def test_every_file_that_a_document_names_exists(name: str) -> None:
    """In backticks: a path that ends in .py, or one of a folder, from the root of the project or of the package."""
    named = [each for each in in_backticks(name) if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)*(\.py|/)", each)]
    assert named
    assert [each for each in named if not (ROOT / each).exists() and not (PACKAGE / each).exists()] == []


@pytest.mark.parametrize("name", OF_THE_CODE)
def test_every_test_that_a_document_names_exists(name: str) -> None:
    named = [each.split("::") for each in in_backticks(name) if "::" in each]
    assert named or name != "docs/methods.md"
    missing = []
    for path, test in named:
        source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
        if not re.search(rf"^def {test}\(", source, re.MULTILINE):
            missing.append(f"{path}::{test}")
    assert missing == []


@pytest.mark.parametrize("name", OF_THE_CODE)
def test_every_class_and_method_that_a_document_names_exists(name: str) -> None:
    """In backticks: a word in camel case, with a method behind it or without."""
    named = [each for each in in_backticks(name) if re.fullmatch(r"(?:[A-Z]+[a-z0-9]+\w*)(\.\w+)?", each)]
    elsewhere = {"Trainer", "Field"}  # fairseq's, pydantic's
    missing = []
    for each in set(named) - elsewhere:
        owner, _, member = each.partition(".")
        if not is_class(owner) or (member and not has_member(owner, member)):
            missing.append(each)
    assert sorted(missing) == []


@pytest.mark.parametrize("name", ALL)
def test_every_link_to_a_file_or_heading_leads_there(name: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        if re.match(r"[a-z]+:", link):
            continue
        where, _, heading = link.partition("#")
        path = (ROOT / name).parent / where if where else ROOT / name
        if not path.exists() or (heading and heading not in anchors(path.resolve())):
            broken.append(link)
    assert broken == []


def test_a_name_that_is_not_in_the_code_is_noticed() -> None:
    """The checks above can fail."""
    assert is_class("Coordinator") and not is_class("Coordinato")
    assert has_member("Coordinator", "push") and not has_member("Coordinator", "publish")
    assert slug("Run it on several machines") == "run-it-on-several-machines"
    assert slug("`tiny` on the C4 sample") == "tiny-on-the-c4-sample"


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1300
