"""Makes a corpus of documents in an invented language, to try the recipe without any data.

The sentences are those of the made-up pair's source language. A document keeps to a topic and a cast: most of its
nouns, verbs and adjectives come from a handful of each, and its names recur. So a model can learn characters, words,
grammar and, last, what a document is about; each of these lowers the perplexity of documents it has not seen.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.made_up_pair.make_corpus import Grammar, Phrase, Word  # noqa: E402
from recipes.steps import once, run_main  # noqa: E402

SIZES = {"train": 6_000, "validation": 300}
FAITHFUL = 0.75  # probability that a word is drawn from the document's own words


class Storyteller(Grammar):
    """Generates documents whose sentences share a topic."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.own: dict[int, list[Word]] = {}
        self.cast: list[Phrase] = []

    def document(self) -> str:
        """Return a document: sentences about one topic, in paragraphs."""
        lists = (self.nouns, self.adjectives, self.verbs, self.adverbs, self.prepositions)
        self.cast = [Grammar.name(self, "") for _ in range(3)]
        self.own = {id(words): [Grammar.pick(self, words) for _ in range(6)] for words in lists}
        return "\n".join(self.paragraph() for _ in range(self.rng.choice((1, 2, 3, 4))))

    def paragraph(self) -> str:
        """Return a few sentences in one line."""
        return " ".join(self.sentence()[0] for _ in range(self.rng.randint(3, 7)))

    def pick(self, words: Sequence[Word]) -> Word:
        """Draw one of `words`, mostly one that the document uses anyway."""
        own = self.own.get(id(words))
        return self.rng.choice(own) if own and self.maybe(FAITHFUL) else super().pick(words)

    def name(self, suffix: str) -> Phrase:
        """Draw a name, mostly one of the cast; `suffix` matters only to the target language, which is unused here."""
        return self.rng.choice(self.cast) if self.maybe(FAITHFUL) else super().name(suffix)


def make_corpus(directory: Path, seed: int = 1) -> None:
    """Write `train.jsonl.gz` and `validation.jsonl.gz`, which have no document in common."""
    storyteller, seen = Storyteller(seed), set[str]()
    for split, count in SIZES.items():
        with gzip.open(directory / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            for text in (new_document(storyteller, seen) for _ in range(count)):
                file.write(json.dumps({"text": text}) + "\n")


def new_document(storyteller: Storyteller, seen: set[str]) -> str:
    """Return a document that is not in `seen`, and add it there."""
    while (text := storyteller.document()) in seen:
        pass
    seen.add(text)
    return text


def main(out: Annotated[Path, typer.Argument(help="Directory to make; left alone where it is there.")]) -> None:
    """Make a corpus of documents in an invented language."""
    print(once(out, make_corpus))


if __name__ == "__main__":
    run_main(main)
