"""What a server writes into its run's directory, and reads there: the log, snapshots, states, what the run is."""
