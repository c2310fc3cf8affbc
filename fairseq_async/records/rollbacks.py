"""``rollbacks.jsonl``: one line for every start of a server that found events; it says which were taken back."""

from pydantic import BaseModel


class Rollback(BaseModel):
    """One start of the server from an older state.

    Attributes:
        source: the state from which the server went on.
        sequences: the number of each worker's last update that is in this state.
        events: how many later events were taken back.
    """

    time: float
    source: str
    sequences: dict[int, int]
    events: int
