"""Tables and pictures of runs and simulations, from the files that they leave."""

GIVE_A_RUN = "give the --run-dir or --save-dir of a run"  # what to do where a directory is none of a run
