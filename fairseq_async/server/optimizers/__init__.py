"""The optimizers of gradient rules in a server, and their learning rates."""
