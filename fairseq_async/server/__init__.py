"""The owner of the parameters: admits updates, applies a rule, answers with parameters."""

from fairseq_async.server.layout import Layout, Segment
from fairseq_async.server.parameter_server import Parameters, ParameterServer
from fairseq_async.server.receipt import Receipt, Status

__all__ = ["Layout", "ParameterServer", "Parameters", "Receipt", "Segment", "Status"]
