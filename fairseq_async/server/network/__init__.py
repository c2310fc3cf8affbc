"""The server's connections: who is at the other end, what comes from there, and in which order it is handled."""
