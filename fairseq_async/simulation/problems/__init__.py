"""The problems that a simulation trains on."""
