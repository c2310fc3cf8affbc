"""Of the methods between the ranks of one synchronous group."""
