"""Of ``fairseq-train`` with our optimizers."""
