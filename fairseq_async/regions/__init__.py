"""A server that is itself a worker of another server (HALoS). Imported only where a run has a region."""
