"""The server's settings: one frozen Config, its only defaults, and the checks that need nothing but the values themselves.

Flags, environment and config file are read in cli.py; this module does not know how a value was spelled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from minserve import hub
from minserve.errors import CheckpointError, UsageError

EMBEDDED_MODEL = "embedded"
"""The name that stands for the small trained checkpoint inside the package."""

EMBEDDED_DIRECTORY = Path(__file__).parent / "assets" / "tiny-deepseek-v3"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a server was told. Sent whole to each engine; `None` and "auto" are resolved where the facts are known."""

    # model
    model: str = EMBEDDED_MODEL
    tokenizer: str | None = None
    served_model_name: tuple[str, ...] = ()
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | None = None
    seed: int = 0

    # edge
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_call_parser: Literal[
        "auto", "none", "deepseek_v3", "deepseek_r1", "deepseek_v31", "kimi_k2", "hermes", "qwen3_coder"
    ] = "auto"
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "deepseek_v31", "kimi_k2", "qwen3"] = "auto"
    max_body_bytes: int = 64 << 20
    max_queued_requests: int = 2048
    drain_timeout: float = 30.0
    metrics_prefix: str = "minserve"
    front_workers: int = 1
    mock_engine: float | None = None
    """Tokens a second of each request, without any model; 0 or infinite: as fast as the front takes them."""

    # engine
    device: Literal["auto", "cpu", "cuda"] = "auto"
    stack: str = "auto"
    deterministic: bool = False
    max_num_seqs: int = 128
    chunked_prefill_size: int = 8192
    """Most tokens of one step; on a CPU never more than 2,048."""
    prefill_step_ratio: float = 2.0
    """A step that reads prompts beside decoding requests may take this many times what those alone take."""
    page_size: int = 64
    num_pages: int | None = None
    """KV pages, the dummy page not counted; None sizes them from memory."""
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_bytes: int = 1 << 30
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    cuda_graph_bs: tuple[int, ...] = ()
    shared_expert: Literal["auto", "fused", "overlap", "serial"] = "auto"
    self_check: Literal["off", "fast", "full"] = "fast"
    kernel_cache: str | None = None
    watchdog_timeout: float = 300.0

    # parallelism
    ep_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    moe_dispatcher: Literal["auto", "deepep", "torch", "local"] = "auto"
    redundant_experts: int = 0
    expert_load: str | None = None
    deepep_mode: Literal["auto", "normal", "low_latency"] = "auto"

    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def local_ranks(self) -> range:
        """The ranks of this host, of all those that share the experts."""
        count = self.ep_size // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)


_AT_LEAST = {
    0: ("mock_engine", "redundant_experts", "drain_timeout", "node_rank", "seed"),
    1: (
        *("max_num_seqs", "chunked_prefill_size", "prefill_step_ratio", "page_size", "num_pages", "cpu_kv_cache_bytes"),
        *("max_queued_requests", "front_workers", "max_body_bytes", "ep_size", "nnodes", "watchdog_timeout"),
    ),
    2: ("max_model_len",),
}


def validate(config: Config) -> Config:
    """The same config, or UsageError with the flag and what to do."""
    for complaint in _complaints(config):
        raise UsageError(complaint)
    return config


def _complaints(c: Config) -> Iterator[str]:
    for name, least in ((name, least) for least, names in _AT_LEAST.items() for name in names):
        value = getattr(c, name)
        if value is not None and not value >= least:
            yield f"{flag_name(name)} must be at least {least}, not {value}"
    for name in ("port", "master_port"):
        if not 0 <= getattr(c, name) <= 65535:
            yield f"{flag_name(name)} must be between 0 and 65535, not {getattr(c, name)}"
    if not 0.05 <= c.gpu_memory_utilization <= 1.0:
        yield f"--gpu-memory-utilization must be between 0.05 and 1, not {c.gpu_memory_utilization}"
    if any(size < 1 for size in c.cuda_graph_bs):
        yield f"--cuda-graph-bs takes batch sizes of at least 1, not {min(c.cuda_graph_bs)}"
    for name in ("api_key", "served_model_name"):
        if any(not value.strip() for value in getattr(c, name)):
            yield f"{flag_name(name)} must not be empty"
    if c.deterministic and (c.stack not in ("auto", "deterministic") or c.ep_size > 1):
        yield "--deterministic is a kernel stack of its own, for one rank: leave --stack and --ep-size away"
    if c.moe_dispatcher == "local" and c.ep_size > 1:
        yield f"--moe-dispatcher local sends nothing to other ranks, and --ep-size {c.ep_size} needs that: torch"
    for name in ("redundant_experts", "expert_load"):
        if getattr(c, name) and c.ep_size == 1:
            yield f"{flag_name(name)} spreads experts over ranks, and there is one: see --ep-size"
    if c.deepep_mode != "auto" and (c.ep_size == 1 or c.moe_dispatcher == "torch"):
        yield f"--deepep-mode {c.deepep_mode}: DeepEP moves tokens between ranks, see --ep-size, --moe-dispatcher"
    if c.ep_size % c.nnodes:
        yield f"--ep-size {c.ep_size} counts the ranks of all hosts: it must be a multiple of --nnodes {c.nnodes}"
    if c.node_rank >= c.nnodes:
        yield f"--node-rank {c.node_rank} must be below --nnodes {c.nnodes}: hosts count from 0"
    if c.nnodes > 1 and c.master_port == 0:
        yield "--master-port 0: with --nnodes above 1 all hosts must know the port"


def flag_name(field: str) -> str:
    """The canonical command-line spelling of a setting: `max_model_len` is `--max-model-len`."""
    return "--" + field.replace("_", "-")


def model_directory(config: Config) -> Path:
    """Where the checkpoint lies; a name of the Hub (`org/name`) that is no directory is looked for there.

    Raises CheckpointError when that is no directory with a config.json.
    """
    try:
        return _model_directory(config)
    except OSError as error:
        raise CheckpointError(f"model {config.model!r} cannot be read: {error.strerror}") from error


def local_model(name: str, *, weights: bool = True) -> Path:
    """Where that lies, if it does: the embedded model, a path, or what the Hub has by that name, with its weights or without."""
    path = EMBEDDED_DIRECTORY if name == EMBEDDED_MODEL else Path(name).expanduser()
    return hub.snapshot(name, weights=weights) if not path.exists() and hub.is_repo_id(name) else path


def _model_directory(config: Config) -> Path:
    path = local_model(config.model)
    if not path.exists():
        raise CheckpointError(f"model {config.model!r}: no such directory; give a checkpoint's path or a Hub name (org/name)")
    if not path.is_dir():
        raise CheckpointError(f"model {config.model!r} is a file; give the directory that holds its config.json")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"model directory {path} has no config.json")
    return path


def kernel_cache_directory(config: Config) -> Path:
    """Where compiled kernels, and what a start found out about this machine, are kept for the next; it may not be there yet."""
    if config.kernel_cache:
        return Path(config.kernel_cache).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minserve" / "kernels"


def printable(config: Config) -> dict[str, Any]:
    """Every setting with its value, secrets hidden: what may be logged or shown by the server."""
    values: dict[str, Any] = msgspec.to_builtins(config)
    return values | {"api_key": ["***"] * len(config.api_key)}


def encode(config: Config) -> bytes:
    return msgspec.msgpack.encode(config)


def decode(body: bytes) -> Config:
    return msgspec.msgpack.decode(body, type=Config)
