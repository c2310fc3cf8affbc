"""Chooses the state from which a new server goes on: worker 0's, or a snapshot of an interrupted run."""

from fairseq_async.algorithms.rule import State
from fairseq_async.errors import RefusedError
from fairseq_async.method.spec import OPTIMIZER_OVERRIDES, MethodSpec
from fairseq_async.protocol.layout import Layout
from fairseq_async.protocol.notices import Tell
from fairseq_async.protocol.work import DRAWN
from fairseq_async.records.snapshots import OTHER, Snapshots
from fairseq_async.server.run import Run, inner_optimizer
from fairseq_async.server.shards.rule import SHARDS


def newest_state(
    run: Run, restored: State | None, snapshots: Snapshots, resumes: bool, tell: Tell
) -> tuple[str, State | None]:
    """Returns the state to go on from, or None to begin anew; and before it the name of this beginning, for the log of
    rollbacks.

    A checkpoint and a snapshot may be of the same training, which was interrupted after the checkpoint: the higher
    version is the newer one. A snapshot that does not fit this run is set aside. Unless the run goes on from a
    snapshot, all that are left are removed: their versions could be taken for later ones of this run.

    Args:
        restored: the state from a checkpoint that worker 0 brings.
        resumes: whether a snapshot of an earlier run counts.

    Raises:
        RefusedError: there are only snapshots that cannot be read.
    """
    found = snapshots.of_run_before(check_snapshot) if resumes else None
    if found is not None:
        path, state = found
        version = int(state["server"]["version"])
        misfit = _misfit(run, state)
        if misfit:
            path.replace(path.with_suffix(OTHER))
            tell(f"{path} is set aside as .other: it is of {misfit}")
        elif restored is None or version > restored["server"]["version"]:
            where = f"{path.name}, at version {version:,}"
            tell(f"the run goes on from {where}: a run was interrupted there; to begin anew, give another directory")
            state["ended"] = state.get("ended") and _length(MethodSpec.from_json(state["spec"])) == _length(run.spec)
            return f"snapshot {path.name}", _with_overrides(state, run.spec)
    elif resumes and restored is None and snapshots.broken:
        raise RefusedError(
            f"no snapshot in {snapshots.directory} can be read, and there is no checkpoint to go on from; to begin "
            "anew, give another directory or remove it"
        )
    snapshots.clear()
    return ("the beginning", None) if restored is None else ("a checkpoint", _with_overrides(restored, run.spec))


def check_snapshot(state: State) -> None:
    """Checks that a state is a server's snapshot; raises any exception, from reading it, if it is not."""
    MethodSpec.from_json(state["spec"])
    Layout.from_json(state["layout"])
    int(state["server"]["version"])


def _length(spec: MethodSpec) -> tuple[object, ...]:
    """What ends a run: a run that one of its workers has ended goes on if it is to become longer."""
    return spec.last_version, spec.whole_steps, spec.max_epoch, spec.options.get("total_steps")


def _with_overrides(state: State, spec: MethodSpec) -> State:
    """Returns the state with the options of the optimizer that the user has given in place of the saved ones."""
    rule = state["server"]["rule"]
    if overrides := spec.framework.get(OPTIMIZER_OVERRIDES):
        for part in (rule, *rule.get(SHARDS, ())):
            for group in part["optimizer"]["param_groups"]:
                group.update(overrides)
    return state


def _misfit(run: Run, state: State) -> str:
    """Returns in words how a snapshot differs from this run; empty if it fits."""
    spec = MethodSpec.from_json(state["spec"])
    if difference := Layout.from_json(state["layout"]).difference(run.layout):
        return f"another model: {difference}"
    places = [position for position in state["positions"].values() if position and position.keys() != {DRAWN}]
    if spec.workers != run.spec.workers and places:
        return f"{spec.workers} workers, each at its place in its part of the data; this run has {run.spec.workers}"
    if state["method"] != run.spec.name:
        return str(state["method"])
    before, now = state.get("inner_optimizer"), inner_optimizer(run.spec)
    return "" if before == now else f"inner optimizer {before}, this run has {now}"
