"""The server's connections: their peers, the messages that come from them, and the order of handling these."""
