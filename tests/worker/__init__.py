"""Of a worker of an asynchronous run, whichever way it came in."""
