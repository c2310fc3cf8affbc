"""The project's documents, and the commands in them: the lines of each block of code that has no language."""

import re
import shlex
from dataclasses import dataclass
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
        "recipes/lora",
        "recipes/multi30k_en_de",
        "recipes/paper",
        "recipes/rules",
    )
    for path in (ROOT / folder).glob("*.md")
)
# Commands of fairseq-async that look at a finished run or need no training.
QUICK = ("audit", "report", "watch", "capacity", "export", "simulate", "certificates")
_STAND_INS = {
    "$(which fairseq-train)": "fairseq-train",
    "$(fairseq-async user-dir)": str(ROOT / "fairseq_async"),
    "HOST:": "10.0.0.1:",
}
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"\n\n((?:    .*\n)+)")  # behind an empty line: else it belongs to the paragraph


@dataclass(frozen=True)
class Block:
    """The commands of one block of code, as they are written; a command on several lines is one."""

    document: str
    commands: tuple[str, ...]


def blocks(document: str) -> list[Block]:
    """In their order on the page."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = [(match.start(), match[2]) for match in _FENCED.finditer(text) if not match[1]]
    without = _FENCED.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), text)
    found += [(match.start(), match[1]) for match in _INDENTED.finditer(without)]
    texts = [code.replace("\\\n", " ").split("\n") for _, code in sorted(found)]
    return [Block(document, tuple(line.strip() for line in each if line.strip())) for each in texts]


def scripts(document: str) -> dict[str, str]:
    """The page's Python files, by name: a block whose first line is a comment with the name, or ``train.py`` where a
    block is a whole script with a model and an optimizer."""
    found = {}
    for language, code in _FENCED.findall((ROOT / document).read_text(encoding="utf-8")):
        named = re.match(r"# (\w+\.py)\n", code)
        if language == "python" and named:
            found[named[1]] = code
        elif language == "python" and code.startswith("import torch\n") and "torch.optim." in code:
            found["train.py"] = code
    return found


def commands(*programs: str) -> list[tuple[str, list[str]]]:
    """Document and words of each command of these programs."""
    found, written = [], [(name, line) for name in ALL for block in blocks(name) for line in block.commands]
    for document, line in written:
        if line.split(" ")[0] in programs or re.match(rf"[A-Z_]+=\S+ ({'|'.join(programs)}) ", line):
            found.append((document, _words(line)))
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
    return scripts("README.md")["train.py"]
