"""In place of SciPy, which takes 1.1 s to import: fairseq's criterions of sentence classification want it."""
