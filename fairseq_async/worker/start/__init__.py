"""How the process of a worker finds or starts the server of its run, and how it ends."""
