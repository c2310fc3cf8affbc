"""The site of the documents: every page is in its navigation, and what pages link to is laid out beside them."""

import re
from pathlib import Path

import pytest
import yaml

from scripts.site.check import broken_links
from scripts.site.stage import documents, linked, stage
from tests.helpers.commands import ROOT

NOT_IN_THE_NAVIGATION = {"recipes/README.md"}


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(each)]  # type: ignore[attr-defined]


def navigation() -> list[str]:
    text = re.sub(r"!!python\S+ ", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return pages_of(yaml.safe_load(text)["nav"])


def test_every_page_is_in_the_navigation_once() -> None:
    known = {str(page) for page in documents()} - NOT_IN_THE_NAVIGATION
    assert sorted(navigation()) == sorted({*known, "reference.md"})


def test_what_a_page_links_to_is_laid_out_beside_it(tmp_path: Path) -> None:
    stage(tmp_path)
    pages = tmp_path / "pages"
    missing = [f"{page}: {each}" for page in documents() for each in linked(page) if not (pages / each).exists()]
    assert (
        not missing and (pages / "docs/images/hybrid.png").is_file() and (pages / "deepspeed_config/index.md").is_file()
    )
    assert ":class:`" not in (tmp_path / "package/fairseq_async/pytorch/hybrid.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("body", "broken"),
    [
        ('<a href="other/#there">', []),
        ('<a href="other/#gone">', ["index.html: other/#gone"]),
        ('<img src="none.png">', ["index.html: none.png"]),
        ('<a href="https://example.org/x">', []),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, body: str, broken: list[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<h1 id="there">')
    (tmp_path / "index.html").write_text(body)
    assert broken_links(tmp_path) == broken
