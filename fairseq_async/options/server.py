"""The options of a run's server, which every method with one has. Does not import torch."""

import re
from typing import Literal

from pydantic import Field, field_validator

from fairseq_async.options.base import LONGEST, GivenPath, Options, Shown
from fairseq_async.options.validation import split_address

_SECONDS: Shown = {"metavar": "S"}
_FILE: Shown = {"metavar": "FILE"}
_OFF: Shown = {"default": "off"}
_MOST_SHARDS = 64


class ServerOptions(Options):
    """The options that every method with a server has besides its own: the server's address, files, timeouts, limits
    and processes."""

    server: str | None = Field(
        None,
        description="address of the server; needed only where workers are on several machines",
        json_schema_extra={"metavar": "HOST:PORT"},
    )
    run_dir: GivenPath = Field(
        "async_training",
        description="directory for events.jsonl, run.json, logs and snapshots",
        json_schema_extra={"metavar": "DIR"},
    )
    token_file: GivenPath | None = Field(
        None,
        description="the run's secret, where other machines can reach the server; only you may read it",
        json_schema_extra=_FILE,
    )
    tls: GivenPath | None = Field(
        None,
        description="directory of certificates, with which every connection is encrypted",
        json_schema_extra={"metavar": "DIR"},
    )
    worker_timeout: float = Field(
        60.0,
        gt=0,
        le=LONGEST,
        description="seconds of a worker's silence after which nobody waits for it",
        json_schema_extra=_SECONDS,
    )
    server_timeout: float = Field(
        600.0,
        ge=0,
        le=LONGEST,
        description="seconds for which a worker waits for a server that is gone",
        json_schema_extra=_SECONDS,
    )
    snapshot_seconds: float = Field(
        60.0,
        gt=0,
        le=LONGEST,
        description="seconds between two snapshots; a server that dies continues from the last one",
        json_schema_extra=_SECONDS,
    )
    max_update_norm_ratio: float | None = Field(
        None,
        gt=1,
        description="refuse an update whose norm is more than this many times the running median of its worker's norms",
        json_schema_extra=_OFF | {"metavar": "R"},
    )
    server_shards: str = Field(
        "1",
        description="number of the server's processes, addresses of fairseq-async shard on other machines, or both: 2 "
        "or HOST:PORT,… or 2,HOST:PORT,…; each holds its share of the model's tensors",
        json_schema_extra={"metavar": "S"},
    )
    server_device: Literal["cpu", "cuda", "auto"] = Field(
        "cpu",
        description="where the server keeps parameters and moments: cuda is the GPU of worker 0's model, auto that GPU "
        "where it has room",
        json_schema_extra={"metavar": "DEVICE"},
    )
    no_standby: bool = Field(False, description="start no second process that becomes the server when that dies")
    record: bool = Field(False, description="keep in the run's directory what a replay needs")

    @field_validator("server_shards", mode="before")
    @classmethod
    def _are_shards(cls, given: object) -> str:
        if isinstance(given, bool) or not isinstance(given, int | str):
            raise ValueError("give a number of processes, addresses HOST:PORT with commas between them, or both")
        first, *rest = (each.strip() for each in str(given).split(","))
        here, hosts = (first, rest) if re.fullmatch(r"-?\d+", first) else ("1", [first, *rest])
        if not 1 <= int(here) <= _MOST_SHARDS:
            raise ValueError(f"give from 1 to {_MOST_SHARDS} processes")
        for host in hosts:
            split_address(host)
        if len(set(hosts)) < len(hosts):
            raise ValueError("the same address is given twice: each host holds one shard")
        return ",".join([here, *hosts])

    @property
    def shard_processes(self) -> int:
        """Number of the server's own processes."""
        return int(self.server_shards.partition(",")[0])

    @property
    def shard_hosts(self) -> str:
        """Addresses of the shards on other machines, with commas between them."""
        return self.server_shards.partition(",")[2]

    @field_validator("server")
    @classmethod
    def _is_address(cls, server: str | None) -> str | None:
        if server is not None:
            split_address(server)
        return server


class Section(ServerOptions):
    """The section ``"async_training"`` of a DeepSpeed configuration, without the options of its method."""

    island_size: int = Field(
        1, ge=1, description="ranks that train synchronously among themselves and are one worker to the server"
    )
