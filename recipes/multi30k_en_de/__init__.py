"""Multi30k English-German: hybrid asynchronous training beside the synchronous run of the same model."""
