"""``run.json``: the description of a run, for programs that read its files."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, JsonValue, PrivateAttr, ValidationError

from fairseq_async.errors import ConfigurationError
from fairseq_async.method.spec import JsonObject, MethodSpec
from fairseq_async.options.validation import first_mistake
from fairseq_async.protocol.layout import Layout

SUMMARY = "summary.json"  # beside it when the trial of a simulation is over


class SimulatedTrial(BaseModel):
    """The trial of a simulation that a run is: its method, its cluster if there are several, its place among all."""

    name: str = ""
    cluster: str = ""
    number: int = 0


class RunDescription(BaseModel):
    """A run as it was begun. Its file may be cut off, or another program's: everything in it is checked.

    Attributes:
        workers: how many workers the run was started with; None where the file does not say.
        method: the JSON of a :class:`~fairseq_async.method.spec.MethodSpec`, of this version or an older one.
        tensors: the JSON of a :class:`~fairseq_async.protocol.layout.Layout`.
        simulated: the trial of a simulation; None for a real run.
    """

    workers: Annotated[int, Field(ge=0)] | None = None
    method: JsonObject
    tensors: JsonValue = Field(None, alias="layout")
    simulated: SimulatedTrial | None = None
    _run_dir: Path = PrivateAttr()

    @classmethod
    def read(cls, run_dir: Path) -> "RunDescription":
        """Reads the description of the run in a directory.

        Raises:
            ConfigurationError: there is no run in the directory, or none that can be read.
        """
        try:
            found = cls.model_validate_json((run_dir / "run.json").read_bytes())
        except (OSError, ValidationError) as error:
            raise _unreadable(run_dir, error) from error
        found._run_dir = run_dir
        return found

    @property
    def spec(self) -> MethodSpec:
        """The method. Raises a ConfigurationError where the file has no valid one."""
        try:
            return MethodSpec.from_json(self.method)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise _unreadable(self._run_dir, error) from error

    @property
    def layout(self) -> Layout:
        """The layout of the model. Raises a ConfigurationError where the file has no valid one."""
        try:
            return Layout.from_json(self.tensors)
        except (ValueError, TypeError) as error:
            raise _unreadable(self._run_dir, error) from error

    @property
    def has_barrier(self) -> bool:
        """Whether rounds have a fixed size, so that workers wait for each other."""
        return bool(self.method.get("barrier")) and not self.closes_early

    @property
    def closes_early(self) -> bool:
        """Whether a round closes when no other worker is near."""
        return bool(self.method.get("closes_early", False))

    @property
    def exchanges_while_computing(self) -> bool:
        """Whether workers of local SGD go on while an update is on its way, whole or in fragments."""
        return bool(self._options.get("overlap") or self._options.get("fragment_delay")) or self.fragments != 1

    @property
    def fragments(self) -> int:
        """Number of fragments in which the model is exchanged."""
        given = self._options.get("fragments", 1)
        return given if isinstance(given, int) else 1

    @property
    def has_regions(self) -> bool:
        """Whether it is a simulation of several regions, whose servers' events are in one file."""
        return self.simulated is not None and "regions" in self._framework

    @property
    def shards(self) -> int:
        """Number of shards of the server, each of which is a process, here or on another machine."""
        server = self.method.get("server")
        options = server if isinstance(server, dict) else {}
        given, hosts = options.get("server_shards", 1), options.get("shard_hosts")
        here = given if isinstance(given, int) and given > 0 else 1
        return here + (len(hosts.split(",")) if isinstance(hosts, str) and hosts else 0)

    @property
    def unit(self) -> str:
        """What the weights of updates count: ``tokens`` in fairseq and in a simulation, else ``local steps``; empty for
        gradients that are weighted by samples or equally."""
        if self.simulated is not None or "inner_optimizer" in self._framework:
            return "tokens"
        return "local steps" if self.method.get("method") == "local_sgd" else ""

    @property
    def _framework(self) -> JsonObject:
        given = self.method.get("framework")
        return given if isinstance(given, dict) else {}

    @property
    def _options(self) -> JsonObject:
        given = self.method.get("options")
        return given if isinstance(given, dict) else {}


def _unreadable(run_dir: Path, error: Exception) -> ConfigurationError:
    why = first_mistake(error) if isinstance(error, ValidationError) else getattr(error, "strerror", None) or error
    return ConfigurationError(
        f"{run_dir}: no run that can be read there (run.json): {why}; give the directory of a run"
    )
