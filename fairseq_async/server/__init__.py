"""The owner of the parameters: admits updates, applies a rule, answers with parameters."""

from fairseq_async.server.parameter_server import Parameters, ParameterServer

__all__ = ["ParameterServer", "Parameters"]
