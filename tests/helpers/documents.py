"""The project's documents."""

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
        "recipes/hf_trainer",
        "recipes/multi30k_en_de",
        "recipes/paper",
    )
    for path in (ROOT / folder).glob("*.md")
)
