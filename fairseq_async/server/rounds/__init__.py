"""How long a round waits for whom, and how far ahead those start who are not waited for."""
