"""A made-up language pair: small enough to train in minutes, rich enough that BLEU means something."""
