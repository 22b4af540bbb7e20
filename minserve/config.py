"""The server's settings: one frozen Config, its only defaults, and the checks that need nothing but the values themselves.

Flags, environment and config file are read in cli.py; this module does not know how a value was spelled.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from minserve.errors import UsageError

EMBEDDED_MODEL = "embedded"
"""The name that stands for the small trained checkpoint inside the package."""


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
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    max_body_bytes: int = 64 << 20
    max_queued_requests: int = 2048
    drain_timeout: float = 30.0
    metrics_prefix: str = "minserve"

    # engine
    device: Literal["auto", "cpu", "cuda"] = "auto"
    stack: str = "auto"
    max_num_seqs: int = 64
    chunked_prefill_size: int = 2048
    """Most tokens of one step."""
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
    deepep_mode: Literal["auto", "normal", "low_latency"] = "auto"

    log_level: Literal["debug", "info", "warning", "error"] = "info"


def validate(config: Config) -> Config:
    """The same config, or UsageError with the flag and what to do."""
    positive = ("max_num_seqs", "chunked_prefill_size", "page_size", "max_queued_requests", "max_body_bytes", "ep_size")
    for name in positive:
        if getattr(config, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(config, name)}")
    if not 0 <= config.port <= 65535:
        raise UsageError(f"--port must be between 0 and 65535, not {config.port}")
    if not 0.05 <= config.gpu_memory_utilization <= 1.0:
        raise UsageError(f"--gpu-memory-utilization must be between 0.05 and 1, not {config.gpu_memory_utilization}")
    if config.max_model_len is not None and config.max_model_len < 2:
        raise UsageError(f"--max-model-len must be at least 2, not {config.max_model_len}")
    return config


def encode(config: Config) -> bytes:
    return msgspec.msgpack.encode(config)


def decode(body: bytes) -> Config:
    return msgspec.msgpack.decode(body, type=Config)
