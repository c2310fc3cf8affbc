"""The messages between workers and server: frozen dataclasses, checked once, when a message is parsed.

A message is a JSON object whose ``kind`` says which class it is. The tensors of updates and parameters travel beside it
(:mod:`fairseq_async.exchange`). Every request but :class:`Alive` gets one answer, in the order of the requests; a
:class:`Push` may get a second one.
"""

from fairseq_async.protocol.answers import (
    Answer,
    ErrorReply,
    Goodbye,
    Greeting,
    Introduced,
    PullReply,
    PushReply,
    ScheduleReply,
    StateSaved,
    Welcome,
    WorkReply,
)
from fairseq_async.protocol.layout import Layout, Segment
from fairseq_async.protocol.parsing import MalformedMessageError, encode, parse_answer, parse_request
from fairseq_async.protocol.receipt import SETTLED, Receipt, Status
from fairseq_async.protocol.requests import (
    Alive,
    Hello,
    Initialise,
    Introduce,
    Leave,
    Pull,
    Push,
    Request,
    SaveState,
    ScheduleEvent,
    WaitForWork,
)
from fairseq_async.protocol.work import Assignment, Report

__all__ = [
    "SETTLED",
    "Layout",
    "Receipt",
    "Segment",
    "Status",
    "Alive",
    "Answer",
    "Assignment",
    "ErrorReply",
    "Goodbye",
    "Greeting",
    "Hello",
    "Initialise",
    "Introduce",
    "Introduced",
    "Leave",
    "MalformedMessageError",
    "Pull",
    "PullReply",
    "Push",
    "PushReply",
    "Report",
    "Request",
    "SaveState",
    "ScheduleEvent",
    "ScheduleReply",
    "StateSaved",
    "WaitForWork",
    "Welcome",
    "WorkReply",
    "encode",
    "parse_answer",
    "parse_request",
]
