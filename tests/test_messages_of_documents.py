"""The error messages that docs/troubleshooting.md explains are those of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.helpers.syntax import syntax_tree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.compile(r"`([^`]+)`( \(\w+'s?\))?")  # the second part marks messages of other programs
PLAIN = re.compile(r"[a-z'-]+[.,:;]?")  # other words differ from one message to the next
WORDS = 4  # so many in a row must be in the code as they are
PUT_TOGETHER = ("the server ended with code", "the server was killed by")  # from parts


def quoted() -> Iterator[str]:
    """Yields the messages of our own in the first column of the page's tables."""
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            yield from (message for message, other in QUOTED.findall(line.split(" | ")[0]) if not other)


def phrases(message: str) -> list[str]:
    """Returns each run of four plain words."""
    pieces: list[list[str]] = [[]]
    for word in message.split():
        if PLAIN.fullmatch(word):
            pieces[-1].append(word)
        else:
            pieces.append([])
    return [" ".join(piece[at : at + WORDS]).strip(".,:;") for piece in pieces for at in range(len(piece) - WORDS + 1)]


@cache
def strings() -> str:
    """Returns all text constants of the code, those of formatted strings with gaps."""
    found = []
    for file in (path for folder in ("fairseq_async", "recipes") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(syntax_tree(file)):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return re.sub(r"\s+", " ", "\n".join(found))


def test_the_messages_that_are_explained_are_in_the_code() -> None:
    code = strings()
    explained = [(message, found) for message in quoted() if (found := phrases(message))]
    assert len(explained) > 15
    unknown = [message for message, found in explained if not any(phrase in code for phrase in found)]
    assert [message for message in unknown if not any(parts in message for parts in PUT_TOGETHER)] == []


def test_a_message_that_was_reworded_is_found() -> None:
    reworded = "--compress X: an update was not worth its bytes; …"
    assert not any(phrase in strings() for phrase in phrases(reworded))
