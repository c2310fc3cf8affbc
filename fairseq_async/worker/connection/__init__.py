"""A worker's connection to its server, which outlasts lost connections and restarted servers."""
