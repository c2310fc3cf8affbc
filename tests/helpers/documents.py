"""The project's documents."""

import re
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


def script_of_the_readme() -> str:
    """The example for plain PyTorch."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- pytorch example -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found
    return found[1]
