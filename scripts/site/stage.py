"""Lays out what mkdocs reads, in build/site: the documents, what they link to, and the package for its docstrings.

Paths are those of the repository, so that links stay as they are. A linked folder becomes a page that lists its files.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)")
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")  # of Sphinx, as in :class:`~package.Name`


def documents(root: Path = ROOT) -> list[Path]:
    """Returns the pages of the site, as paths from the root."""
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("recipes/**/README.md")]
    return sorted(path.relative_to(root) for path in found)


def linked(page: Path, root: Path = ROOT) -> Iterator[Path]:
    """Yields what a page links to, as paths from the root."""
    text = _CODE.sub("", (root / page).read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        yield (root / page.parent / link).resolve().relative_to(root)


def stage(out: Path) -> None:
    """Writes ``pages`` and ``package`` in ``out``, from nothing."""
    shutil.rmtree(out, ignore_errors=True)
    for page in documents():
        _copy(page, out / "pages")
        for target in linked(page):
            _copy(target, out / "pages")
    shutil.copy(Path(__file__).with_name("reference.md"), out / "pages")
    for path in (ROOT / "fairseq_async").rglob("*.py"):
        copy = out / "package" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(_ROLE.sub(r"`\1`", path.read_text(encoding="utf-8")), encoding="utf-8")


def _copy(path: Path, pages: Path) -> None:
    source, copy = ROOT / path, pages / path
    if copy.exists():
        return
    if source.is_dir():
        files = sorted(each for each in source.iterdir() if each.is_file() and each.suffix != ".pyc")
        copy.mkdir(parents=True, exist_ok=True)
        for each in files:
            _copy(path / each.name, pages)
        if not (source / "README.md").exists():
            lines = [f"- [{each.name}]({each.name})" for each in files]
            (copy / "index.md").write_text(f"# `{path}/`\n\n" + "\n".join(lines) + "\n", encoding="utf-8")
        return
    copy.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix != ".md":
        shutil.copy(source, copy)
    else:  # GitHub takes a link to a folder; mkdocs wants its page
        text = source.read_text(encoding="utf-8")
        copy.write_text(_LINK.sub(lambda found: _with_page(found, path), text), encoding="utf-8")


def _with_page(found: re.Match[str], page: Path) -> str:
    target = ROOT / page.parent / found[1]
    name = "README.md" if (target / "README.md").exists() else "index.md"
    return f"{found[0].rstrip('/')}/{name}" if target.is_dir() else found[0]


if __name__ == "__main__":
    stage(ROOT / "build" / "site")
    sys.stdout.write(f"{len(documents())} pages\n")
