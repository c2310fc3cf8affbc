"""A run in the server process: its model and method and, once it has parameters, its coordinator and its log."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from fairseq_async.algorithms import Update
from fairseq_async.algorithms.rule import State
from fairseq_async.errors import RefusedError, option
from fairseq_async.method.spec import JsonObject, MethodSpec
from fairseq_async.protocol import Hello, Push, PushReply, StateSaved, Welcome, WorkReply
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.notices import Tell, tell_log
from fairseq_async.protocol.receipt import SETTLED
from fairseq_async.protocol.sketches import different
from fairseq_async.records.event_log import ControlEvent, EventLog, Settled
from fairseq_async.records.recording import START, update_path
from fairseq_async.records.state_files import moved, private, restored_path, saved_path, write_state
from fairseq_async.server.build import build_coordinator
from fairseq_async.server.coordinator import Coordinator
from fairseq_async.server.first_batches import FirstBatches
from fairseq_async.server.membership import Membership
from fairseq_async.server.outcome import Instruction
from fairseq_async.server.parameter_server import ParameterServer
from fairseq_async.server.plan import Build
from fairseq_async.server.shards.build import build_sharded, shared_copy
from fairseq_async.server.shards.remote import HostConnector, connect_hosts
from fairseq_async.server.slots import Slots


class Run:
    """One run of a server: its method, model, shared memory and log. Worker 0 describes it and brings the parameters.

    Args:
        run_dir: where ``events.jsonl`` and ``run.json`` go.
        slots: how many workers there can be at one time.
        tell: passes a line to the user who runs the server.
        reach: how to reach the hosts of shards on other machines; not needed where there are none.
        gpu: name of the GPU of worker 0's model; empty where there is none.

    Attributes:
        slots: the vectors that go between the server and its workers.
        from_checkpoint: whether the run has begun from a checkpoint that every worker is to read.
        moments: checksum of the moments that worker 0's optimizers have brought; None after the server's own restart.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: MethodSpec,
        layout: Layout,
        slots: int,
        tell: Tell = tell_log,
        reach: HostConnector | None = None,
        gpu: str = "",
    ) -> None:
        self.run_dir, self.spec, self.layout, self._tell, self._reach = run_dir, spec, layout, tell, reach
        self.slots, self._gpu = Slots(spec, layout, slots, gpu, tell), gpu
        self._coordinator: Coordinator | None = None
        self.from_checkpoint = False
        self.moments: str | None = None
        self._untrained: str | None = None  # of the first worker that has said hello
        self._buffers = ""  # of the first worker that has some
        self._unsaved: dict[str, list[float]] = {}  # likewise
        self._checked = set[str]()  # workers; one that is started again may have buffers of a checkpoint
        self._first_batches = FirstBatches(tell, spec.workers)

    @property
    def begun(self) -> bool:
        """Whether the run has parameters."""
        return self._coordinator is not None

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator.

        Raises:
            RefusedError: there are no parameters yet.
        """
        if self._coordinator is None:
            raise RefusedError("the server has no parameters yet")
        return self._coordinator

    def check(self, name: str, hello: Hello) -> None:
        """Checks that a worker has this run's model and method, and what else it has to share with the first that came.

        Raises:
            RefusedError: it has another.
        """
        if difference := hello.layout.difference(self.layout):
            raise RefusedError(
                f"{name} has another model than the others: {difference}; start all with the same "
                "flags, dictionaries and model"
            )
        if other := self.spec.difference(hello.spec.as_long_as(self.spec) if hello.any_length else hello.spec):
            raise RefusedError(f"{name} was started with another {other}")
        if self._untrained is None:
            self._untrained, self._first_batches.must_differ = hello.untrained, hello.by_script
        if hello.untrained != self._untrained:
            raise RefusedError(
                f"{name} has other values than the others in parameters that are not trained: no worker gets these "
                "from the server; load them, or make the model with the same torch.manual_seed, in every worker"
            )
        self._buffers = self._buffers or hello.buffers
        if hello.buffers not in ("", self._buffers) and name not in self._checked:
            raise RefusedError(
                f"{name} has other values than the others in buffers that the model saves, which no worker gets from "
                "the server: load the same model in every worker, or make it with the same torch.manual_seed"
            )
        self._unsaved = self._unsaved or hello.unsaved
        if (buffer := different(self._unsaved, hello.unsaved)) and name not in self._checked:
            raise RefusedError(
                f"{name} has other values than the others in the buffer {buffer}, which the model does not save and no "
                "worker gets from the server: make it with the same torch.manual_seed in every worker, or keep what is "
                "to differ in an attribute that is no buffer"
            )
        if hello.by_script != self._first_batches.must_differ:
            raise RefusedError(
                f"{name} {'reads' if hello.by_script else 'does not read'} callback.workers before training, unlike "
                "others, and a script that reads it divides the data itself: read it in every worker, or in none"
            )
        self._checked.add(name)

    def begin(
        self, build: Build, parameters: Tensor, state: State | None, source: str, membership: Membership, time: float
    ) -> None:
        """Begins the run with a copy of the parameters (flat, fp32), or with a state, which has its own.

        Args:
            state: a state from :meth:`state_dict` to go on from; None begins anew.
            source: the name of the beginning in the log of rollbacks.
            time: seconds since 1970.
        """
        if self.spec.server.shards > 1:
            read = {"state": state, "parameters": parameters}
            remote = connect_hosts(self._reach, self.spec, self.layout, parameters)
            # no other copy may be in memory at the fork: the shards would keep it
            parameters = shared_copy(self.slots.local_part.of(parameters))
            rule, plan = build_sharded(
                build,
                self.spec,
                self.layout,
                parameters,
                self.slots.memory.slot,
                directory=self.run_dir,
                read=read,
                remote=remote,
            )
        else:
            parameters = parameters.to(self.slots.device, copy=True)
            rule, plan = build(self.spec, self.layout, parameters)
        coordinator = build_coordinator(self.spec, rule, plan, parameters, membership)
        if state is not None:
            self._check_state(state)
            state = moved(state, self.slots.device)
            coordinator.load_state_dict(state)
            self.slots.load_state_dict(state)
        server, resumed = coordinator.server, state is not None
        self._recorder = Recorder(self.run_dir, server, resumed) if self.spec.server.record else None
        self.events = EventLog(self.run_dir, server.sequences, source, time, self._tell)
        description = {"workers": self.spec.workers, "method": self.spec.to_json(), "layout": self.layout.to_json()}
        self._write_description(json.dumps(description, indent=1) + "\n")
        self._coordinator = coordinator
        self.slots.publish(server)

    def _write_description(self, text: str) -> None:
        """Writes ``run.json``; a server that was started again on a full disk leaves it as it is."""
        path = self.run_dir / "run.json"
        if not path.exists() or path.read_text(errors="replace") != text:
            path.write_text(text)

    def checked_update(self, worker: int, push: Push) -> Update:
        """Returns the update in the worker's slot; raises a RefusedError if no worker can have sent it, or its data is
        another's."""
        delta, tokens = self.slots.update(worker, push.sequence), push.report.tokens or 0.0
        missing = int(push.report.missing or "0", 16)
        if missing >> len(self.layout.segments):
            raise RefusedError("the update lacks gradients of parameters that the model does not have")
        micro_batches = push.report.micro_batches or 1
        share = push.report.share or 1.0
        if share != 1.0 and self.spec.server.shard_hosts:
            raise RefusedError(
                "workers of unequal numbers of ranks do not go with shards on other machines, where no process has the "
                "whole update to weigh: give all workers as many ranks"
            )
        base, weight = push.base_version, push.weight
        update = Update(worker, push.sequence, base, weight, delta, tokens, missing, micro_batches, share)
        self.coordinator.check(update, push.report)
        if push.report.first_batch is not None:
            self._first_batches.note(worker, push.report.first_batch)
        return update

    def log(self, settled: list[Settled], time: float) -> None:
        """Writes the events of updates that were settled together; ``time`` in seconds since 1970."""
        for each in settled:
            recorded = {} if self._recorder is None else self._recorder.of(each)
            if self._recorder is not None and self.spec.of_regions and each.receipt.status in SETTLED:
                path = update_path(self.run_dir, each.receipt.worker, each.receipt.sequence)
                self.events.keep(path, self.slots.memory.slot(each.receipt.worker))  # it is there until it is answered
            report = each.report
            if each.receipt.status not in SETTLED:  # its position does not count, and may be sent again and again
                report = replace(report, position=None)
            self.events.write(time, each.receipt, report, each.recorded | recorded)

    def welcome(self, worker: int, slots: int, now: float) -> Welcome:
        """Returns the answer to a worker that has joined; ``slots`` is how many workers there is room for."""
        state_path, (path, on_gpu) = str(restored_path(self.run_dir)), self.slots.place_of(worker)
        publishes = self.slots.memory.publishes
        if not self.begun:
            return Welcome(False, path, publishes, slots, state_path, on_gpu)
        coordinator, server = self.coordinator, self.coordinator.server
        instruction = coordinator.instruct(worker, None, now)
        return Welcome(
            initialised=True,
            state_path=state_path,
            memory=path,
            publishes=publishes,
            slots=slots,
            on_gpu=on_gpu,
            version=server.version,
            sequence=1 + server.sequences.get(worker, -1),
            position=coordinator.positions.get(worker),
            refused=server.refused.get(worker, 0),
            finished=instruction.finished,
            from_checkpoint=self.from_checkpoint,
            total_steps=self.spec.total_steps,
            moments=self.moments,
            assignment=instruction.assignment,
        )

    def reply(self, instruction: Instruction) -> PushReply | WorkReply:
        """Returns the message that brings a worker its instruction."""
        receipt, server = instruction.receipt, self.coordinator.server
        if receipt is None:
            return WorkReply(instruction.finished, instruction.assignment)
        return PushReply(
            status=receipt.status,
            # not the receipt's: behind a barrier the round may have gone on after this update, and the worker pulls now
            version=server.version,
            staleness=receipt.staleness,
            refused=server.refused.get(instruction.worker, 0),
            finished=instruction.finished,
            assignment=instruction.assignment,
            norm=receipt.norm,
            cosine=receipt.cosine,
            taken=server.takes(receipt),
        )

    def state_dict(self) -> State:
        """Returns all that another server needs to go on, besides the method's options, which its workers bring."""
        own: State = {"method": self.spec.name, "inner_optimizer": inner_optimizer(self.spec)}
        own["fragments"], own["server_shards"] = self.spec.fragments, self.spec.server.shards
        own["layout"] = self.layout.to_json()  # an export takes the names of the tensors from it
        # in memory: a process that is forked from this one, and writes a snapshot, must not use the GPU
        return own | moved(self.slots.state_dict() | self.coordinator.state_dict(), torch.device("cpu"))

    def snapshot(self) -> State:
        """Returns all that another server needs to go on by itself, while the workers wait for it.

        A process that is forked from this one writes it while this one takes further updates.
        """
        own = {"spec": self.spec.to_json(), "from_checkpoint": self.from_checkpoint, "gpu": self._gpu}
        state = self.state_dict() | self.coordinator.state_for_waiting_workers() | own
        if self.spec.server.server_shards > 1 and not self.spec.server.hosts:
            # Hazard: the shards' memory is shared. Unlike the rest, the parameters would change in that process too.
            state["server"] = state["server"] | {"parameters": state["server"]["parameters"].clone()}
        return state

    def save_state(self, worker: int) -> StateSaved:
        """Writes :meth:`state_dict` into a file, which the worker then takes away."""
        path = saved_path(self.run_dir, worker)
        write_state(path, self.state_dict())
        return StateSaved(self.coordinator.server.version, str(path))

    def _check_state(self, state: State) -> None:
        if state["method"] != self.spec.name:
            raise RefusedError(
                f"the checkpoint is of {state['method']}, this run is of {self.spec.name}: take that "
                "method, or begin anew with its parameters alone"
            )
        if (count := state.get("fragments", 1)) != self.spec.fragments:
            raise RefusedError(
                f"the checkpoint's momentum is of {count} fragments, this run has {self.spec.fragments}: give "
                f"{option('fragments')} {count}, or "
                "begin anew with its parameters alone"
            )
        if (count := state.get("server_shards", 1)) != (now := self.spec.server.shards):
            raise RefusedError(
                f"the checkpoint's state is of a server in {count} shards, this run's is in {now}: give "
                f"{as_many(count, len(self.spec.server.hosts))}, or "
                "begin anew with its parameters alone"
            )
        before, own = state.get("inner_optimizer"), inner_optimizer(self.spec)
        if before != own and before is not None:
            raise RefusedError(
                f"the checkpoint's inner optimizer is {before}, this run's is {own}: give "
                f"{option('inner_optimizer')} {before}, or "
                "begin anew with its parameters alone"
            )


def as_many(shards: int, hosts: int) -> str:
    """Returns what gives a server in so many shards to a user who has given so many hosts of shards."""
    here, hosts = (shards - hosts, hosts) if shards > hosts else (1, shards - 1)
    return f"{option('server_shards')} {here}" + ",HOST:PORT" * hosts


def inner_optimizer(spec: MethodSpec) -> str | None:
    """Returns the name of the optimizer that steps in the server; None where the framework names none."""
    inner = spec.framework.get("inner_optimizer")
    return str(inner["_name"]) if isinstance(inner, dict) and "_name" in inner else None


class Recorder:
    """Writes the server's first state, and adds to events the fields that a replay needs besides: checksums, control
    events.

    Args:
        resumed: whether the first state is a checkpoint's or a snapshot's.
    """

    def __init__(self, run_dir: Path, server: ParameterServer, resumed: bool) -> None:
        self._server, self._version = server, server.version
        state = {"server": server.state_dict(), "resumed": resumed, "threads": torch.get_num_threads()}
        with open(run_dir / START, "wb", opener=private) as file:
            torch.save(state, file)

    def of(self, settled: Settled) -> JsonObject:
        """Returns the fields for this update's event. Of updates that were applied together, the checksum is of the
        parameters after the last."""
        added: JsonObject = {}
        if settled.receipt.status not in SETTLED:  # a replay does not read these lines
            return added
        if settled.control_events:
            added["control_events"] = [_described(event) for event in settled.control_events]
        if settled.receipt.version == self._server.version != self._version:
            self._version = settled.receipt.version
            added["checksum"] = self._server.checksum()
        return added


def _described(event: ControlEvent) -> JsonObject:
    return {key: value for key, value in asdict(event).items() if value is not None}
