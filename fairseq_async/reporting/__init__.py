"""Tables and pictures of runs and simulations, from the files that they leave."""
