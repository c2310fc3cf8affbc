"""Makes the tables of docs/capabilities.md from docs/capabilities.json.

``python scripts/capability_tables.py`` fails if the tables differ from the file; ``--write`` brings them up to date.

In the file a cell is ``refused``, the name of a test on the CPU, or ``gpu:`` and a test or a page of results.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, FILE = ROOT / "docs" / "capabilities.md", ROOT / "docs" / "capabilities.json"
COLUMNS = ("fp32", "bf16", "fp16", "ZeRO", "islands", "compressed", "sharded", "on a GPU")
GPU, REFUSED = "gpu:", "refused"
_TABLES = re.compile(r"(<!-- tables -->\n).*(<!-- end -->)", re.DOTALL)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if "--write" in sys.argv[1:]:
        PAGE.write_text(updated(text), encoding="utf-8")
    elif text != updated(text):
        sys.exit("docs/capabilities.md: not as docs/capabilities.json; run python scripts/capability_tables.py --write")


def updated(text: str) -> str:
    """Returns the page with its tables brought up to date."""
    known = json.loads(FILE.read_text(encoding="utf-8"))
    tables = [_table(method, rows, known["gpu"]) for method, rows in known["methods"].items()]
    return _TABLES.sub(lambda found: found[1] + "\n" + "\n".join(tables) + found[2], text)


def _table(method: str, rows: dict[str, dict[str, str]], gpu: dict[str, str]) -> str:
    lines = [f"## `{method}`", "", f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for front_end, cells in rows.items():
        shown = (_cell(cells[column], gpu) if column in cells else "–" for column in COLUMNS)
        lines.append(f"| {front_end} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _cell(value: str, gpu: dict[str, str]) -> str:
    if value == REFUSED:
        return "refused"
    on_gpu = value.startswith(GPU)
    path = value.removeprefix(GPU).partition("::")[0]
    link = path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
    where = f"a GPU]({link}) ({gpu['card']}, {gpu['date']})" if on_gpu else f"CPU]({link})"
    return f"[tested on {where}"


if __name__ == "__main__":
    main()
