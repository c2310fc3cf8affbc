"""All that the workers of a run have in common: begun anew, or from a state on disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_async.algorithms import Lateness, NormGate, Rule
from fairseq_async.errors import RefusedError
from fairseq_async.server.events import EventLog
from fairseq_async.server.layout import Layout
from fairseq_async.server.parameter_server import ParameterServer, Receipt, Status
from fairseq_async.server.plan import Message, Plan
from fairseq_async.server.recording import Recorder

Build = Callable[[Message, Layout, Tensor], tuple[Rule, Plan]]
"""Makes rule and plan from a method's description, the layout and the flat parameters."""
State = dict[str, Any]


class Run:
    """Server, rule and plan of one method, with where each worker is in its data, and the log of events.

    Args:
        parameters: flat fp32; the run's own from now on.
        state: of :meth:`state_dict`, to go on from; None begins anew.
        source: what to call it in the log of rollbacks.
        now: seconds since 1970.

    Attributes:
        positions: where in its data each worker was with its last update.
        heard: the number of each worker's last plan message, and the answer.
    """

    def __init__(
        self,
        run_dir: Path,
        build: Build,
        method: Message,
        layout: Layout,
        parameters: Tensor,
        state: State | None,
        source: str,
        now: float,
    ) -> None:
        self.method, self.layout = method, layout
        self.rule, self.plan = build(method, layout, parameters)
        self.server = ParameterServer(
            parameters,
            self.rule,
            barrier=int(method["barrier"]),
            last_version=method.get("last_version"),
            lateness=Lateness(**method.get("lateness", {})),
            gate=NormGate(method.get("max_update_norm_ratio")),
        )
        self.positions: dict[int, Message] = {}
        self.heard: dict[int, tuple[int, Message]] = {}
        if state is not None:
            self._load_state_dict(state)
        self.recorder = Recorder(run_dir, self.server, state is not None) if method.get("record") else None
        self.events = EventLog(run_dir, self.server.sequences, source, now)
        description = {"workers": method.get("workers"), "method": method, "layout": layout.to_json()}
        (run_dir / "run.json").write_text(json.dumps(description, indent=1) + "\n")

    @property
    def finished(self) -> bool:
        return self.server.finished or self.plan.finished

    def assignment(self, worker: int) -> Message:
        """What an answer says to a worker, besides the receipt."""
        refused = self.server.refused.get(worker, 0)
        return {"version": self.server.version, "refused": refused, **self.plan.assign(worker)}

    def record(self, receipt: Receipt, report: Message, now: float) -> None:
        """An update was settled: notes where in its data the worker was, for its restart, and writes the event."""
        if receipt.status in (Status.APPLIED, Status.REFUSED, Status.STALE, Status.OUTLIER):
            self.positions[receipt.worker] = report.get("position", {})
            self.plan.record(receipt.worker, receipt.weight, report)
        recorded = {} if self.recorder is None else self.recorder.of(receipt)
        self.events.write(now, receipt, report | recorded)

    def limit_round(self, updates: int) -> None:
        """No step is to wait for more updates than these."""
        self.rule.limit_round(updates)
        if self.recorder is not None:
            self.recorder.note(event="limit_round", updates=updates)

    def hear(self, worker: int, message: Message) -> Message:
        """A message of the method's own, which may come a second time when the answer to it was lost."""
        number, answer = self.heard.get(worker, (None, {}))
        if number is None or number != message["number"]:
            answer = self.plan.hear(worker, message)
            if self.recorder is not None:
                self.recorder.note(**{key: value for key, value in message.items() if key not in ("kind", "number")})
            self.heard[worker] = message["number"], answer
        return answer

    def state_dict(self) -> State:
        """All that another server needs to go on, with workers that have been told the method."""
        return {
            "method": name_of(self.method),
            "inner_optimizer": _inner(self.method),
            "server": self.server.state_dict(),
            "positions": self.positions,
            "plan": self.plan.state_dict(),
        }

    def snapshot(self) -> State:
        """All that another server needs to go on by itself, while the workers wait for it."""
        return self.state_dict() | {"layout": self.layout.to_json(), "description": self.method, "heard": self.heard}

    def _load_state_dict(self, state: State) -> None:
        if state["method"] != name_of(self.method):
            raise RefusedError(f"the checkpoint is of {state['method']}, this run is of {name_of(self.method)}")
        before, now = state.get("inner_optimizer"), _inner(self.method)
        if before != now and before is not None:
            raise RefusedError(
                f"the checkpoint's inner optimizer is {before}, this run's is {now}: give --inner-optimizer {before}, "
                "or --reset-optimizer"
            )
        self.server.load_state_dict(state["server"])
        self.plan.load_state_dict(state["plan"])
        self.positions = dict(state["positions"])
        self.heard = dict(state.get("heard", {}))


def name_of(method: Message) -> str:
    """A method in words."""
    return " with outer ".join(str(method[key]) for key in ("method", "outer") if key in method)


def _inner(method: Message) -> str | None:
    """The optimizer that steps in the server, by fairseq's name."""
    inner = method.get("inner_optimizer")
    return inner.get("_name") if isinstance(inner, dict) else None


def read(path: Path) -> State:
    """The state in a file.

    Raises:
        RefusedError: it cannot be read.
    """
    try:
        state: State = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError) as error:
        raise RefusedError(f"{path}: the server's state cannot be read: {error}") from error
    return state
