"""The files that a run leaves, and reads again: events, descriptions, snapshots and states."""
