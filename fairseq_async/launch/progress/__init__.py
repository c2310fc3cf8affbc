"""The progress of a run, from its files, on the terminal."""
