"""The options of a run's server, which every method with one has. Does not import torch."""

from pydantic import Field, field_validator

from fairseq_async.options.base import LONGEST, GivenPath, Options, Shown
from fairseq_async.options.validation import split_address

_SECONDS: Shown = {"metavar": "S"}
_FILE: Shown = {"metavar": "FILE"}
_OFF: Shown = {"default": "off"}


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
        description="seconds without a word after which nobody waits for a worker",
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
        description="seconds between two snapshots, from which a server that dies goes on",
        json_schema_extra=_SECONDS,
    )
    max_update_norm_ratio: float | None = Field(
        None,
        gt=1,
        description="refuse an update whose norm is more than this many times the running median of its worker's",
        json_schema_extra=_OFF | {"metavar": "R"},
    )
    server_shards: int = Field(
        1,
        ge=1,
        le=64,
        description="processes of the server, each with its share of the model's tensors",
        json_schema_extra={"metavar": "S"},
    )
    shard_hosts: str = Field(
        "",
        description="addresses of fairseq-async shard on other machines, with commas between them; each holds one more "
        "shard",
        json_schema_extra=_OFF | {"metavar": "HOST:PORT,…"},
    )
    no_standby: bool = Field(False, description="start no second process that becomes the server when that dies")
    record: bool = Field(False, description="keep in the run's directory what a replay needs")

    @field_validator("shard_hosts")
    @classmethod
    def _are_addresses(cls, hosts: str) -> str:
        given = [host.strip() for host in hosts.split(",")] if hosts else []
        for host in given:
            split_address(host)
        if len(set(given)) < len(given):
            raise ValueError("the same address is given twice: each host holds one shard")
        return ",".join(given)

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
