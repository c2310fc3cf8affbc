"""Makes a parallel corpus of two invented languages whose grammars differ as those of real pairs do.

| what | source | target |
|---|---|---|
| order | adverb subject verb object prepositional phrase | subject postpositional phrase object adverb verb |
| noun phrase | article adjective noun | article noun adjective |
| agreement | none | article, adjective and verb have the number and gender of their noun |
| case | none | objects have a suffix |
| compounds | modifier + head | head + linking sound + modifier |
| names | made of syllables | another letter for each letter; the last vowel decides the gender |

Every source sentence has one translation. Names and compounds are built anew for each sentence, so most of those in
the test set are in no training sentence, and only their parts can be learnt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PAIR = ("src", "tgt")
SIZES = {"train": 15_000, "valid": 500, "test": 500}

SOURCE_LETTERS = "ptkmnslraeiou"
TARGET_LETTERS = "bdgnmzrlioeau"
TRANSLITERATION = str.maketrans(SOURCE_LETTERS, TARGET_LETTERS)
ENDINGS = {("m", False): "o", ("f", False): "a", ("m", True): "i", ("f", True): "e"}
ARTICLES = {"the": "l", "this": "kest", "some": "un", "every": "tut"}
TENSES = {"": "", "will": "ra", "did": "sh"}


@dataclass(frozen=True)
class Word:
    """A stem in both languages; `gender` matters for nouns, and nothing in the source shows it."""

    source: str
    target: str
    gender: str


@dataclass(frozen=True)
class Phrase:
    """A noun phrase in both languages, and the ending that its verb takes in the target."""

    source: str
    target: str
    ending: str


class Grammar:
    """Draws sentences and their translations; the same seed gives the same lexicon and sentences."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.stems: set[str] = set()
        self.nouns = self.words(160)
        self.adjectives, self.verbs = self.words(50), self.words(60)
        self.adverbs, self.prepositions = self.words(16), self.words(8)

    def words(self, count: int) -> list[Word]:
        """Invent words of two syllables and a final consonant."""
        return [Word(self.stem("bdfgvz"), self.stem("cjpstk"), self.rng.choice("mf")) for _ in range(count)]

    def stem(self, initials: str) -> str:
        """Invent a stem that no other word has."""
        letters = (initials, "aeiou", "lmnr", "aeiou", "dgklst")
        while (stem := "".join(map(self.rng.choice, letters))) in self.stems:
            pass
        self.stems.add(stem)
        return stem

    def pick(self, words: Sequence[Word]) -> Word:
        """Draw a word, the k-th one 1/sqrt(k) times as often as the first, so that some are rare, as in any text."""
        return self.rng.choices(words, [(k + 1) ** -0.5 for k in range(len(words))])[0]

    def maybe(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def noun(self) -> Word:
        """Draw a noun; sometimes a compound, which has the gender of its head."""
        head = self.pick(self.nouns)
        if not self.maybe(0.15):
            return head
        modifier = self.pick(self.nouns)
        return Word(modifier.source + head.source, f"{head.target}u{modifier.target}", head.gender)

    def name(self, suffix: str) -> Phrase:
        """Invent a name of two or three syllables."""
        syllables = [self.rng.choice("ptkmnslr") + self.rng.choice("aeiou") for _ in range(self.rng.choice((2, 3)))]
        source = "".join(syllables)
        gender = "f" if source[-1] in "ae" else "m"
        return Phrase(source.title(), source.translate(TRANSLITERATION).title() + suffix, ENDINGS[gender, False])

    def phrase(self, suffix: str = "") -> Phrase:
        """Draw a name, or an article, up to two adjectives and a noun; `suffix` marks the case in the target."""
        if self.maybe(0.2):
            return self.name(suffix)
        noun, plural, article = self.noun(), self.maybe(0.35), self.rng.choice(list(ARTICLES))
        adjectives = [self.pick(self.adjectives) for _ in range(self.rng.choice((0, 0, 1, 1, 2)))]
        ending = ENDINGS[noun.gender, plural]
        source = [article, *(a.source for a in adjectives), noun.source + ("en" if plural else "")]
        target = [ARTICLES[article] + ending, noun.target + ("ai" if plural else "") + suffix]
        target += [a.target + ending for a in reversed(adjectives)]
        return Phrase(" ".join(source), " ".join(target), ending)

    def sentence(self) -> tuple[str, str]:
        """Draw a sentence and its translation."""
        subject, verb, tense = self.phrase(), self.pick(self.verbs), self.rng.choice(list(TENSES))
        source, target = [subject.source, tense, verb.source], [verb.target + TENSES[tense] + subject.ending]
        if self.maybe(0.4):
            adverb = self.pick(self.adverbs)
            source, target = [adverb.source, *source], [adverb.target, *target]
        if self.maybe(0.8):
            object_ = self.phrase("im")
            source, target = [*source, object_.source], [object_.target, *target]
        if self.maybe(0.4):
            preposition, place = self.pick(self.prepositions), self.phrase()
            source, target = [*source, preposition.source, place.source], [place.target, preposition.target, *target]
        return " ".join(filter(None, source)) + ".", " ".join([subject.target, *target]) + "."


def make_corpus(directory: Path, seed: int = 1) -> None:
    """Write train, valid and test; no source sentence occurs twice in the corpus."""
    grammar = Grammar(seed)
    pairs: dict[str, str] = {}
    while len(pairs) < sum(SIZES.values()):
        pairs.update([grammar.sentence()])
    sentences = iter(pairs.items())
    for split, size in SIZES.items():
        chosen = [next(sentences) for _ in range(size)]
        for side, language in enumerate(PAIR):
            text = "".join(pair[side] + "\n" for pair in chosen)
            (directory / f"{split}.{language}").write_text(text, encoding="utf-8")
