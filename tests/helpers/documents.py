"""The project's documents, and the commands in them."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALL = sorted(
    str(path.relative_to(ROOT))
    for folder in (
        ".",
        "docs",
        "docs/results",
        "recipes",
        "recipes/c4_lm",
        "recipes/cluster",
        "recipes/hf_trainer",
        "recipes/multi30k_en_de",
        "recipes/paper",
    )
    for path in (ROOT / folder).glob("*.md")
)
_STAND_INS = {
    "$(which fairseq-train)": "fairseq-train",
    "$(fairseq-async user-dir)": str(ROOT / "fairseq_async"),
    "HOST:": "10.0.0.1:",
}


def lines(text: str) -> list[str]:
    """Of the blocks of code: those between fences without a language, and those that are indented."""
    fenced = [code for name, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if not name]
    indented = re.findall(r"^    (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return [line.strip() for block in [*fenced, "\n".join(indented)] for line in block.replace("\\\n", " ").split("\n")]


def commands(*programs: str) -> list[tuple[str, list[str]]]:
    """Document and words of each command of these programs."""
    found = []
    for name in ALL:
        for line in lines((ROOT / name).read_text(encoding="utf-8")):
            first = line.split(" ")[0]
            if "──" not in line and (first in programs or re.match(rf"[A-Z_]+=\S+ ({'|'.join(programs)}) ", line)):
                found.append((name, _words(line)))
    return found


def _words(line: str) -> list[str]:
    """A command without its comment and variables, with stand-ins for what a reader fills in."""
    for name, stand_in in _STAND_INS.items():
        line = line.replace(name, stand_in)
    found = shlex.split(line.replace("|", "\\|"), comments=True)
    while found and re.fullmatch(r"[A-Z_]+=.*", found[0]):
        del found[0]
    return found


def script_of_the_readme() -> str:
    """The example for plain PyTorch."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- pytorch example -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found
    return found[1]
