"""The command of a run's workers, as the launcher reads it."""
