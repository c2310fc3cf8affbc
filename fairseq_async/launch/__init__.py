"""Starts and watches the processes of a run on one machine."""
