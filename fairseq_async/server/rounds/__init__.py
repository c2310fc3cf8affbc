"""How long a round waits for which workers, and how far ahead of the parameters workers with stale updates start."""
