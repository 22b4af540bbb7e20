"""How settings are spelled: flags, aliases, MINSERVE_* variables and config-file keys, all resolved into one Config.

Types and defaults are read from Config. Knows nothing of what a setting does.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from minserve.config import Config, flag_name, printable, validate
from minserve.errors import UsageError
from minserve.seat import SEAT_VARIABLE

ENVIRONMENT_PREFIX = "MINSERVE_"
INTERNAL_VARIABLES = frozenset({"MINSERVE_ENGINE_FD", SEAT_VARIABLE})
"""Set by launch for its own children; not settings."""


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One setting's spellings. Words are without leading dashes; `_` and `-` are the same."""

    field: str
    help: str
    aliases: tuple[str, ...] = ()
    opposites: tuple[str, ...] = ()
    """Booleans only: words that switch the setting off (`no-FIELD` is always one)."""


FLAGS = (
    Flag("model", "checkpoint directory or Hub name (org/name); positional too; without it the embedded model", ("model-path",)),
    Flag("tokenizer", "directory of the tokenizer, when it is not the checkpoint's", ("tokenizer-path",)),
    Flag("served_model_name", "names that clients may use; default: the model as given"),
    Flag("load_format", "dummy: random weights, no checkpoint data is read"),
    Flag("dtype", "compute type; auto: the checkpoint's on a GPU, float32 on a CPU"),
    Flag("kv_cache_dtype", "type of the KV cache; auto: the compute type"),
    Flag("max_model_len", "prompt and output tokens of one request, at most", ("context-length",)),
    Flag("seed", "seed of the random weights of --load-format dummy", ("random-seed",)),
    Flag("host", "address to listen on"),
    Flag("port", "port to listen on; 0: any free one"),
    Flag("api_key", "keys that clients must send; may be repeated"),
    Flag("cors_origins", "origins that browsers may call from; * for all", ("allowed-origins",)),
    Flag("chat_template", "file with a Jinja chat template, instead of the checkpoint's"),
    Flag("tool_call_parser", "how tool calls are read from the model's text; auto: by the model's type"),
    Flag("reasoning_parser", "how reasoning is told from the answer; auto: by the model's type"),
    Flag("max_body_bytes", "largest request body"),
    Flag("max_queued_requests", "requests waiting or running before new ones get 429"),
    Flag("drain_timeout", "seconds that running requests get after SIGTERM"),
    Flag("metrics_prefix", "first word of the metric names; vllm: for ready-made dashboards"),
    Flag("front_workers", "processes that answer HTTP on the one port; each takes its share of the queue"),
    Flag("mock_engine", "no model: requests get their prompt's tokens again, X a second each; 0: as fast as the front takes"),
    Flag("device", "where to compute"),
    Flag("stack", "named kernel stack"),
    Flag("deterministic", "a request's greedy tokens never depend on those beside it; slower, needs a GPU"),
    Flag("max_num_seqs", "requests that run at once", ("max-running-requests",)),
    Flag("chunked_prefill_size", "most tokens of one step; on a CPU never more than 2048", ("max-num-batched-tokens",)),
    Flag(
        "prefill_step_ratio",
        "times a decode step's time that a step with prompt tokens in it may take (a GPU's always 80 ms); inf: no bound",
    ),
    Flag("page_size", "tokens of one KV page", ("block-size",)),
    Flag("num_pages", "KV pages; default: from memory", ("num-gpu-blocks-override",)),
    Flag("gpu_memory_utilization", "share of the whole GPU for the whole process"),
    Flag("cpu_kv_cache_bytes", "KV cache on a CPU, in bytes"),
    Flag("enable_prefix_caching", "reuse the KV pages of equal prompt beginnings", (), ("disable-radix-cache",)),
    Flag("enforce_eager", "never capture CUDA graphs", ("disable-cuda-graph",)),
    Flag("cuda_graph_bs", "batch sizes to capture", ("cuda-graph-sizes", "cudagraph-capture-sizes")),
    Flag("shared_expert", "the shared expert: slots of the routed kernels, a second stream, after them, or what is fastest here"),
    Flag("self_check", "how much is proven before serving"),
    Flag("kernel_cache", "directory for compiled kernels, and for what starts find out about this machine"),
    Flag("watchdog_timeout", "seconds without progress after which an engine counts as stuck"),
    Flag("ep_size", "ranks that share the experts, of all hosts together", ("ep", "expert-parallel-size")),
    Flag("nnodes", "hosts of the group"),
    Flag("node_rank", "this host's number in the group"),
    Flag("master_addr", "address of host 0"),
    Flag("master_port", "port of host 0"),
    Flag("moe_dispatcher", "how tokens travel to the experts", ("moe-a2a-backend", "all2all-backend")),
    Flag("redundant_experts", "more expert slots than experts, of all ranks together: copies of those with the most tokens"),
    Flag("expert_load", "file with what /server_info answered: places experts so that ranks get equal shares of that load"),
    Flag("deepep_mode", "DeepEP's kernels"),
    Flag("log_level", "least severe log line"),
)

_DATA_PARALLEL = "attention is data-parallel here, use --ep-size to spread a model over several GPUs"
_NO_REMOTE_CODE = "code from a checkpoint is never run, leave the flag out"
REFUSED = {
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel-size"), _DATA_PARALLEL),
    **dict.fromkeys(("pp", "pp-size", "pipeline-parallel-size"), _DATA_PARALLEL),
    **dict.fromkeys(("dp", "dp-size", "data-parallel-size", "enable-dp-attention"), _DATA_PARALLEL),
    "trust-remote-code": _NO_REMOTE_CODE,
}
"""Flags that people bring from other servers, and the sentence each is answered with."""


def visible_gpus() -> int:
    """GPUs that this process may use, without loading a driver library; at least 1."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return max(1, len([part for part in chosen.split(",") if part.strip() not in ("", "-1")]))
    return max(1, len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))


CONSTANTS: dict[str, tuple[str, Callable[[], Any]]] = {"enable-expert-parallel": ("ep_size", visible_gpus)}
"""Flags without a value that set another flag's field."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """What the person asked for, from every place."""

    config: Config
    sources: dict[str, str]
    """Field to where its value came from: "flag", a variable's name or the config file's path; defaults are not listed."""
    warnings: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Spelling:
    field: str
    negated: bool = False
    constant: Callable[[], Any] | None = None


def _spellings() -> dict[str, _Spelling]:
    table: dict[str, _Spelling] = {}
    for flag in FLAGS:
        words = (flag.field.replace("_", "-"), *flag.aliases)
        table |= {word: _Spelling(flag.field) for word in words}
        if _type_of(flag.field) is bool:
            opposites = (*flag.opposites, *(f"no-{word}" for word in words))
            table |= {word: _Spelling(flag.field, negated=True) for word in opposites}
    table |= {word: _Spelling(field, constant=value) for word, (field, value) in CONSTANTS.items()}
    return table


def resolve(arguments: Sequence[str], environment: Mapping[str, str]) -> Resolved:
    """Flags win over variables, variables over the config file, the file over defaults. Raises UsageError."""
    from_flags, file = _read_arguments(arguments)
    from_environment, warnings = _read_environment(environment)
    file = file or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file:
        for field, value in _read_file(Path(file)).items():
            values[field], sources[field] = value, str(file)
    for field, (value, variable) in from_environment.items():
        values[field], sources[field] = value, variable
    for field, value in from_flags.items():
        values[field], sources[field] = value, "flag"
    return Resolved(validate(Config(**values)), sources, warnings)


def _read_arguments(arguments: Sequence[str]) -> tuple[dict[str, Any], str | None]:
    """The values that flags gave, and the config file's path."""
    spellings = _spellings()
    values: dict[str, Any] = {}
    file: str | None = None
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith("-"):
            if "model" in values and values["model"] != argument:
                raise UsageError(f"two models given: {values['model']!r} and {argument!r}")
            values["model"] = argument
            continue
        written, has_value, text = argument.partition("=")
        word = written.lstrip("-").replace("_", "-")
        spelling = spellings.get(word)
        if word != "config" and spelling is None:
            raise UsageError(_unknown(written, word, spellings, prefix="--"))
        if spelling is not None and _takes_no_value(spelling):
            values[spelling.field] = _switch(written, spelling, text if has_value else "true")
            continue
        if not has_value:
            if not waiting or waiting[0].startswith("--"):
                raise UsageError(f"{written} needs a value")
            text = waiting.pop(0)
        if spelling is None:
            file = text
            continue
        value = _convert(written, spelling.field, text)
        if _type_of(spelling.field) == tuple[int, ...]:
            while waiting and waiting[0].isdecimal():
                value += _convert(written, spelling.field, waiting.pop(0))
        if isinstance(value, tuple):
            value = values.get(spelling.field, ()) + value
        if spelling.field == "model" and values.get("model", value) != value:
            raise UsageError(f"two models given: {values['model']!r} and {value!r}")
        values[spelling.field] = value
    return values, file


def _read_environment(environment: Mapping[str, str]) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """Field to (value, variable), and a warning for each variable that means nothing."""
    spellings = _spellings()
    values: dict[str, tuple[Any, str]] = {}
    warnings: list[str] = []
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in INTERNAL_VARIABLES:
            continue
        word = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("_", "-")
        text = environment[variable]
        if word == "config":
            continue
        if word in REFUSED:
            raise UsageError(f"{variable}: {REFUSED[word]}")
        if word not in spellings:
            warnings.append(_unknown(variable, word, spellings, prefix=ENVIRONMENT_PREFIX))
            continue
        if not text:
            raise UsageError(f"{variable} is set but empty; unset it or give it a value")
        spelling = spellings[word]
        switch = _takes_no_value(spelling)
        value = _switch(variable, spelling, text) if switch else _convert(variable, spelling.field, text)
        values[spelling.field] = (value, variable)
    return values, warnings


def _read_file(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"config file {path} is no TOML: {error}") from error
    spellings = _spellings()
    values: dict[str, Any] = {}
    for key, value in document.items():
        word = key.replace("_", "-")
        spelling = spellings.get(word)
        where = f"config file {path}, {key}"
        if spelling is None:
            raise UsageError(f"config file {path}: {_unknown(key, word, spellings, prefix='')}")
        if _takes_no_value(spelling):
            values[spelling.field] = _switch(where, spelling, value)
        else:
            values[spelling.field] = _convert(where, spelling.field, value)
    return values


def _takes_no_value(spelling: _Spelling) -> bool:
    return spelling.constant is not None or _type_of(spelling.field) is bool


def _switch(written: str, spelling: _Spelling, value: Any) -> Any:
    """The field's value after a word that needs none: `--enforce-eager`, `--no-enforce-eager`, `--enforce-eager=false`."""
    on = _as_bool(written, value)
    if spelling.constant is not None:
        return spelling.constant() if on else msgspec.structs.asdict(Config())[spelling.field]
    return on is not spelling.negated


def _as_bool(written: str, value: Any) -> bool:
    word = str(value).lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"{written}: expected true or false, not {value!r}")


def _convert(written: str, field: str, value: Any) -> Any:
    """`value`, text or a TOML value, as the field's type."""
    expected = _type_of(field)
    if typing.get_origin(expected) is tuple:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        value = [part.strip() if isinstance(part, str) else part for part in parts]
    try:
        converted = msgspec.convert(value, expected, strict=False)
        msgspec.msgpack.encode(converted)  # as it will travel to the engine: in 64 bits
        return converted
    except (msgspec.ValidationError, OverflowError) as error:
        raise UsageError(f"{written}: expected {_describe(expected)}, not {value!r}") from error


def _type_of(field: str) -> Any:
    """The field's type without `None`: nobody spells None, they leave the flag out."""
    hint = _hints()[field]
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    return hint


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Config)


def _describe(expected: Any) -> str:
    if typing.get_origin(expected) is Literal:
        return "one of " + ", ".join(typing.get_args(expected))
    return {int: "a whole number", float: "a number", tuple[int, ...]: "whole numbers"}.get(expected, "text")


def _unknown(written: str, word: str, spellings: Iterable[str], *, prefix: str) -> str:
    """The sentence for a word that no setting has."""
    if word in REFUSED:
        return f"{written}: {REFUSED[word]}"
    near = difflib.get_close_matches(word, [*spellings, "config"], n=1, cutoff=0.5)
    upper = prefix == ENVIRONMENT_PREFIX
    hint = f"; did you mean {prefix}{near[0].upper().replace('-', '_') if upper else near[0]}?" if near else ""
    return f"{written} is no setting of minserve{hint}"


def usage() -> str:
    """The flags with their aliases and defaults, for --help."""
    defaults = printable(Config())
    lines = ["Usage: minserve launch [MODEL] [FLAGS]", ""]
    lines += ["Serve a checkpoint over HTTP. Every flag can be set as MINSERVE_<FLAG> or in --config FILE (TOML), too.", ""]
    for flag in FLAGS:
        expected = _type_of(flag.field)
        value = "" if expected is bool else " " + _placeholder(expected)
        spelled = ", ".join([flag_name(flag.field), *(f"--{alias}" for alias in flag.aliases)]) + value
        if expected is bool:
            spelled += ", " + ", ".join(f"--{word}" for word in (f"no-{flag.field.replace('_', '-')}", *flag.opposites))
        default = defaults[flag.field]
        shown = f" [{_show(default)}]" if default is not None and default != () else ""
        lines += [f"  {spelled}", f"        {flag.help}{shown}"]
    lines += ["  --enable-expert-parallel", "        --ep-size with all visible GPUs"]
    lines += ["  --config FILE", "        settings as TOML, key = value"]
    return "\n".join(lines)


def _placeholder(expected: Any) -> str:
    if typing.get_origin(expected) is Literal:
        return "|".join(typing.get_args(expected))
    return {int: "N", float: "X", tuple[int, ...]: "N[,N...]", tuple[str, ...]: "TEXT[,TEXT...]"}.get(expected, "TEXT")


def table(resolved: Resolved) -> str:
    """The whole resolved Config, one line a setting, with where each value came from."""
    rows = [(field, _show(value), resolved.sources.get(field, "")) for field, value in printable(resolved.config).items()]
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(40, max(len(value) for _, value, _ in rows))
    return "\n".join(f"  {name:{name_width}}  {value:{value_width}}  {source}".rstrip() for name, value, source in rows)


def _show(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
