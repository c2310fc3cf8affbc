"""Exports the server's parameters, from a run or a checkpoint, to formats that other programs read."""

from fairseq_async.export.writing import Format, export

__all__ = ["Format", "export"]
