"""Translation recipes: from raw text to a BLEU score."""
