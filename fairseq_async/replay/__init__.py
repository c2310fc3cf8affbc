"""Repeats a recorded run in one process, bit for bit."""

from fairseq_async.replay.replay import Recording, Replay, quiet

__all__ = ["Recording", "Replay", "quiet"]
