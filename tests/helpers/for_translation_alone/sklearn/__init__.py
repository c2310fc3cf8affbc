"""In place of scikit-learn, which takes 1.7 s to import: fairseq's criterions of sentence classification want it."""
