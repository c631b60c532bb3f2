"""Settings of one agent: defaults, then a TOML file, then the environment."""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from workers.probes.mps import DEFAULT_LOGS, DEFAULT_PIPES
from workers.protocol.addresses import assess_address

_ENV_PREFIX = "EXAOPS_AGENT_"
_LOWEST_PORT = 1024
_HIGHEST_PORT = 65_535


class ConfigError(ValueError):
    """A setting that cannot be used; the text names it."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator may set for a node. Every field has a default that works on one machine."""

    address: str = ""
    """Where replicas bind and are reached; empty: what was given at joining, else loopback."""
    port_min: int = 41_000
    port_max: int = 48_999
    labels: dict[str, str] = {}
    simulated: bool = False
    memory_bytes: int = 0
    """Upper bound for replicas on a node without accelerators; 0: 80% of what the host has."""
    cpu_threads: int = 0
    """Threads for each replica on a CPU; 0: an even share of the host's cores."""
    template_processes: bool = True
    """Fork engines off a process that has their imports; false: start each as a program of its own."""
    device_holders: bool = True
    """Let replicas of a CUDA device share its memory through a process that holds it."""
    kv_pool_bytes: int = 0
    """Size of each pool of KV blocks that replicas share; 0: what the replicas bring that are there."""
    mps_pipe_directory: str = str(DEFAULT_PIPES)
    """Where the node's MPS control daemon listens; that of a MIG slice in a folder with the slice's UUID."""
    mps_log_directory: str = str(DEFAULT_LOGS)
    canary_seconds: float = 60.0
    """Command intake that has been silent for longer is restarted."""
    stop_grace_seconds: float = 10.0
    """From SIGTERM to SIGKILL."""
    starts_at_once: int = 4
    """Engines that may start at the same time, since they share a disk; 0: any number."""
    memory_wait_seconds: float = 300.0
    """For so long a launch waits until the memory that it was promised is seen to be free; 0: not at all."""
    dcgm_url: str = ""
    """Page of a `dcgm-exporter` on this host, such as http://127.0.0.1:9400/metrics; empty: none is asked."""
    log_cap_bytes: int = 64 * 1024 * 1024
    vllm_python: str = ""
    """Interpreter of the environment that vLLM is installed in; empty: this node does not offer it."""
    sglang_python: str = ""
    """The same for SGLang."""
    trust_remote_code: bool = False
    """Let deployments have engines run Python that comes with a model."""
    weights_folder: str = ""
    """Where copies of weights lie, on a fast disk of the node's own; empty: in the agent's home."""
    weights_margin_bytes: int = 2 * 1024 * 1024 * 1024
    """Left free on that disk whatever is wanted there."""
    weights_limit_bytes: int = 0
    """Most that weights may take of it; 0: all but the margin."""
    weights_at_once: int = 2
    """Models that are fetched at the same time."""
    weights_streams: int = 4
    """Connections that each is fetched by."""
    weights_bytes_per_second: float = 0.0
    """Of all fetching on this node; 0: as fast as it goes."""
    weights_scrub_bytes_per_second: float = 16e6
    """What is read of idle weights to find bytes that the disk changed; 0: nothing."""
    weights_local_sources: bool = False
    """Fetch weights also from addresses of this very host, its cable, or its cloud's metadata service."""
    weights_peers: bool = True
    """Give pieces of weights to other nodes and take them from there, as the control plane plans it."""
    weights_peer_port: int = 0
    """Where they are given, on `address`; 0: on any free port."""
    weights_give_bytes_per_second: float = 0.0
    """Most that is given to all other nodes together; 0: as much as the link carries."""

    def checked(self) -> AgentConfig:
        """Return itself. Raises `ConfigError` for a value out of range."""
        if not _LOWEST_PORT <= self.port_min <= self.port_max <= _HIGHEST_PORT:
            raise ConfigError(f"port range {self.port_min}-{self.port_max} is not usable")
        self._check_addresses()
        if self.weights_folder and not Path(self.weights_folder).is_absolute():
            raise ConfigError(f"weights_folder {self.weights_folder!r} is not an absolute path")
        if self._lowest_of_weights() < 0 or self.weights_at_once < 1 or self.weights_streams < 1:
            raise ConfigError("settings of weights must not be negative; at_once and streams are at least 1")
        if self.starts_at_once < 0:
            raise ConfigError(f"starts_at_once is {self.starts_at_once}; give 0 for any number, or a limit")
        if self.canary_seconds <= 0 or min(self.stop_grace_seconds, self.memory_wait_seconds) < 0:
            raise ConfigError(
                "canary_seconds must be positive; stop_grace_seconds and memory_wait_seconds not negative"
            )
        return self

    def _check_addresses(self) -> None:
        if self.address:
            # It is bound as well as given to others, so it must be one of this host's own.
            verdict = assess_address(self.address, allow_local=True)
            if verdict.address != self.address:
                raise ConfigError(
                    f"address {self.address!r} is not usable: {verdict.reason or 'no port here'}"
                )
        if self.dcgm_url and not _is_on_this_host(self.dcgm_url):
            raise ConfigError(
                f"dcgm_url {self.dcgm_url!r} is not a page on this host; give http://127.0.0.1:9400/metrics"
            )

    def _lowest_of_weights(self) -> float:
        return min(
            self.weights_margin_bytes,
            self.weights_limit_bytes,
            self.weights_bytes_per_second,
            self.weights_scrub_bytes_per_second,
            self.weights_give_bytes_per_second,
            self.weights_peer_port,
        )


def _is_on_this_host(url: str) -> bool:
    """An exporter elsewhere would tell of other cards, and an agent asks no addresses that it is handed."""
    try:
        parts = urlsplit(url)
        is_local = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
    return parts.scheme == "http" and is_local


def load_config(path: Path | None, environ: Mapping[str, str]) -> AgentConfig:
    """Read the settings. Raises `ConfigError` naming what is wrong and where."""
    values: dict[str, object] = {}
    if path is not None:
        try:
            values.update(tomllib.loads(path.read_text()))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
    values.update(_from_environment(environ))
    try:
        return msgspec.convert(values, AgentConfig, strict=False).checked()
    except msgspec.ValidationError as error:
        raise ConfigError(f"agent settings: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(AgentConfig):
        text = environ.get(_ENV_PREFIX + field.name.upper())
        if text:
            values[field.name] = parse_labels(text) if field.name == "labels" else text
    ports = environ.get(_ENV_PREFIX + "PORTS")
    if ports:
        low, dash, high = ports.partition("-")
        if not dash:
            raise ConfigError(f"{_ENV_PREFIX}PORTS is like 41000-48999, not {ports!r}")
        values |= {"port_min": low, "port_max": high}
    return values


def parse_labels(text: str) -> dict[str, str]:
    """Labels from `rack=r1,zone=a`. Raises `ConfigError` for an entry without `=`."""
    labels = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = entry.partition("=")
        if not equals:
            raise ConfigError(f"label {entry!r} is not key=value")
        labels[key.strip()] = value.strip()
    return labels
