"""A server divided among several processes (shards), each of which holds a part of the model."""
