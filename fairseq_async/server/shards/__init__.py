"""A server that is several processes, each with a part of the model."""
