"""Runs on a Ray cluster: actors place, find and restart the processes of a run; tensors stay on our own connections."""
