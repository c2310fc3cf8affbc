"""The files that a server writes and reads in its run's directory: log, snapshots, states, description of the run."""
