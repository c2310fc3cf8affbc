"""Makes the tables of options in the documents from the methods' models.

``python scripts/option_tables.py`` names the documents whose tables differ; ``--write`` brings them up to date.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fairseq_async.method import option_flags  # noqa: E402
from fairseq_async.method.option_flags import INNER_OPTIMIZER, MICRO_BATCHES, Option  # noqa: E402
from fairseq_async.options.config import Section  # noqa: E402

DOCUMENTS = ("docs/fairseq.md", "docs/local_sgd.md", "docs/adasum.md", "docs/adascale.md")
_TABLE = re.compile(r"(<!-- options: (?P<name>[\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    differing = [name for name in DOCUMENTS if (text := (ROOT / name).read_text(encoding="utf-8")) != updated(text)]
    if "--write" in sys.argv[1:]:
        for name in differing:
            path = ROOT / name
            path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
            print(f"{name}: written")
    elif differing:
        sys.exit(f"{', '.join(differing)}: not as the options are; run python scripts/option_tables.py --write")


def updated(text: str) -> str:
    """Returns a document with its tables brought up to date."""
    return _TABLE.sub(lambda found: f"{found[1]}{TABLES[found['name']]()}{found[3]}", text)


def _flags(method: str) -> str:
    rows = [(option_flags.spelling(method, option.name), option) for option in option_flags.flags_of(method)]
    return _table("flag", rows)


def _asynchronous_flags(method: str) -> str:
    own = [(option_flags.spelling(method, option.name), option) for option in option_flags.flags_of(method)]
    servers = [(option.flag, option) for option in option_flags.server_flags()]
    fairseqs = [INNER_OPTIMIZER, *([MICRO_BATCHES] if method == "hybrid_async" else [])]
    return _table("flag", [*((option.flag, option) for option in fairseqs), *own, *servers])


def _keys(options: Iterable[Option]) -> str:
    return _table("option", [(option.name, option) for option in options], metavars=False)


TABLES: dict[str, Callable[[], str]] = {
    "hybrid_async flags": lambda: _asynchronous_flags("hybrid_async"),
    "local_sgd keys": lambda: _keys(option_flags.options_of_method("local_sgd")),
    "server keys": lambda: _keys(option_flags.server_options(Section)),
    "adasum flags": lambda: _flags("adasum"),
    "adascale flags": lambda: _flags("adascale"),
}


def _table(head: str, rows: Iterable[tuple[str, Option]], metavars: bool = True) -> str:
    lines = [f"| {head} | default | meaning |", "|---|---|---|"]
    for name, option in rows:
        shown = f"{name} {option.metavar}" if metavars and option.metavar else name
        meaning = option.description.replace("|", "\\|")
        lines.append(f"| `{shown}` | {option.default} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
