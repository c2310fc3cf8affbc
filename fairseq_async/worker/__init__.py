"""A worker's part in a run, whichever door it came in by."""
