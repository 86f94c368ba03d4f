"""Read an operator's settings from `EVOENGINE_*` in the environment.

A secret may be in a file that `EVOENGINE_…_FILE` names.
"""

from __future__ import annotations

import ipaddress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from evoengine.errors import UsageError
from evoengine.gpu import find_gpu
from evoengine.tuning.ray_cluster import check_address
from evoengine.workloads.triton_kernel import TRITON_FILE

LOOPBACK = "127.0.0.1"
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Settings(BaseSettings):
    """Each field is the variable EVOENGINE_NAME; the ledger is EVOENGINE_DB or what EVOENGINE_DB_FILE holds."""

    model_config = SettingsConfigDict(env_prefix="EVOENGINE_", frozen=True, extra="ignore")

    host: str = LOOPBACK
    """address to listen on"""
    port: int = Field(default=8765, ge=0, le=65535)
    cpu_jobs: int = Field(default=1, ge=0, le=1024)
    """jobs without a GPU that run here at the same time; each uses a process per core"""
    cluster: str | None = None
    """Ray cluster on which all jobs run: auto, ray://HOST:10001 or HOST:6379; this machine's GPUs are then not used"""
    cluster_gpus: Annotated[tuple[str, ...], NoDecode] = ()
    """kinds of GPU that the cluster has or can start, as in h100,a100"""
    kernels: Path | None = None
    """a folder of folders with kernels (evoengine new) that jobs may name; their code is run"""
    recorded: Path | None = None
    """a folder of recorded spaces that jobs may name"""
    require_tokens: bool | None = None
    """also on loopback; on other addresses tokens are always required"""
    takeover_seconds: float = Field(default=30.0, ge=2.0, le=3600.0)
    """after which a server without a heartbeat counts as dead; raise it where machines sleep or the network stalls"""
    max_body: int = Field(default=64 * 1024, ge=1024, le=1 << 30)
    """bytes of a request's body"""
    max_trials: int = Field(default=10_000, ge=1)
    """of a job, per problem"""
    max_minutes: float = Field(default=24 * 60.0, gt=0)
    """of a job, per problem"""
    max_jobs: int = Field(default=1000, ge=1)
    """unfinished jobs per token"""
    max_streams: int = Field(default=200, ge=1)
    """requests that may wait for events at the same time"""
    max_connections: int = Field(default=200, ge=1)
    """per address; requests in progress for an address that a trusted proxy forwards"""
    trusted_proxy: Annotated[tuple[Network, ...], NoDecode] = ()
    """addresses of proxies whose X-Forwarded-For is trusted, as in 127.0.0.1,10.0.0.0/8"""
    dashboard_url: str | None = None
    """URL of optuna-dashboard, linked from the status page"""

    @field_validator("cluster")
    @classmethod
    def _is_cluster(cls, address: str | None) -> str | None:
        return check_address(address, "EVOENGINE_CLUSTER") if address else None

    @field_validator("cluster_gpus", mode="before")
    @classmethod
    def _known_kinds(cls, listed: object) -> object:
        if not isinstance(listed, str):
            return listed
        try:
            return tuple(find_gpu(kind.strip()).key for kind in listed.split(",") if kind.strip())
        except UsageError as error:
            raise UsageError(f"EVOENGINE_CLUSTER_GPUS: {error}") from error

    @field_validator("trusted_proxy", mode="before")
    @classmethod
    def _networks(cls, listed: object) -> object:
        if not isinstance(listed, str):
            return listed
        try:
            return tuple(ipaddress.ip_network(each.strip()) for each in listed.split(",") if each.strip())
        except ValueError as error:
            raise UsageError(f"trusted proxies: {error}; write addresses, as in 127.0.0.1,10.0.0.0/8") from error

    def trusts(self, address: str) -> bool:
        """Return whether the address belongs to a trusted proxy."""
        try:
            asking = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(asking in network for network in self.trusted_proxy)

    @property
    def on_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def tokens_required(self) -> bool:
        return bool(self.require_tokens) or not self.on_loopback

    @cached_property
    def kernel_folders(self) -> dict[str, Path]:
        """Name of a kernel's folder → the folder. Raises UsageError if there is no such folder of folders."""
        folders = _within(self.kernels, "EVOENGINE_KERNELS")
        return {p.name: p for p in folders if any((p / name).is_file() for name in ("problem.json", TRITON_FILE))}

    @cached_property
    def recorded_files(self) -> dict[str, Path]:
        """Name → file. Raises UsageError if there is no such folder."""
        return {p.name: p for p in _within(self.recorded, "EVOENGINE_RECORDED") if p.is_file()}


def load_settings(**given: object) -> Settings:
    """Return the settings of the environment, overridden by what is `given` and not None.

    Raises UsageError naming the variable.
    """
    try:
        stated: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return Settings(**stated)
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(map(str, first["loc"])).upper()
        raise UsageError(f"EVOENGINE_{name} is {first['input']!r}: {first['msg']}") from error


def _within(folder: Path | None, variable: str) -> list[Path]:
    if folder is None:
        return []
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(f"{variable} names {folder}, which cannot be read: {error.strerror}") from error
