"""How settings are spelled: flags, aliases, MINSERVE_* variables and config-file keys, all resolved into one Config.

Types and defaults are read from Config. Knows nothing of what a setting does.
"""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from minserve.config import Config, flag_name, printable, validate
from minserve.errors import UsageError
from minserve.seat import DESCRIPTOR_VARIABLE, SEAT_VARIABLE

ENVIRONMENT_PREFIX = "MINSERVE_"
INTERNAL_VARIABLES = frozenset({DESCRIPTOR_VARIABLE, SEAT_VARIABLE})
"""Set by launch for its own children; not settings."""


HELP = {
    "model": "checkpoint directory or Hub name (org/name); positional too; without it the embedded model",
    "tokenizer": "directory of the tokenizer, when it is not the checkpoint's",
    "served_model_name": "names that clients may use; default: the model as given",
    "load_format": "dummy: random weights, no checkpoint data is read",
    "dtype": "compute type; auto: the checkpoint's on a GPU, float32 on a CPU",
    "kv_cache_dtype": "type of the KV cache; auto: the compute type",
    "max_model_len": "prompt and output tokens of one request, at most",
    "seed": "seed of the random weights of --load-format dummy",
    "host": "address to listen on",
    "port": "port to listen on; 0: any free one",
    "api_key": "keys that clients must send; may be repeated",
    "cors_origins": "origins that browsers may call from; * for all",
    "chat_template": "file with a Jinja chat template, instead of the checkpoint's",
    "tool_call_parser": "how tool calls are read from the model's text; auto: by the model's type",
    "reasoning_parser": "how reasoning is told from the answer; auto: by the model's type",
    "max_body_bytes": "largest request body",
    "max_queued_requests": "requests waiting or running before new ones get 429",
    "drain_timeout": "seconds that running requests get after SIGTERM",
    "metrics_prefix": "first word of the metric names; vllm: for ready-made dashboards",
    "front_workers": "processes that answer HTTP on the one port; each takes its share of the queue",
    "mock_engine": "no model: requests get their prompt's tokens again, X a second each; 0: as fast as the front takes",
    "device": "where to compute",
    "stack": "named kernel stack",
    "deterministic": "a request's greedy tokens never depend on those beside it; slower, needs a GPU",
    "max_num_seqs": "requests that run at once",
    "chunked_prefill_size": "most tokens of one step; on a CPU never more than 2048",
    "prefill_step_ratio": "times a decode step's time that a step with prompt tokens in it may take "
    "(a GPU's always 80 ms); inf: no bound",
    "page_size": "tokens of one KV page",
    "num_pages": "KV pages; default: from memory",
    "gpu_memory_utilization": "share of the whole GPU for the whole process",
    "cpu_kv_cache_bytes": "KV cache on a CPU, in bytes",
    "enable_prefix_caching": "reuse the KV pages of equal prompt beginnings",
    "enforce_eager": "never capture CUDA graphs",
    "cuda_graph_bs": "batch sizes to capture",
    "shared_expert": "the shared expert: slots of the routed kernels, a second stream, after them, or what is fastest here",
    "self_check": "how much is proven before serving",
    "kernel_cache": "directory for compiled kernels, and for what starts find out about this machine",
    "watchdog_timeout": "seconds without progress after which an engine counts as stuck",
    "ep_size": "ranks that share the experts, of all hosts together",
    "nnodes": "hosts of the group",
    "node_rank": "this host's number in the group",
    "master_addr": "address of host 0",
    "master_port": "port of host 0",
    "moe_dispatcher": "how tokens travel to the experts",
    "redundant_experts": "more expert slots than experts, of all ranks together: copies of those with the most tokens",
    "expert_load": "file with what /server_info answered: places experts so that ranks get equal shares of that load",
    "deepep_mode": "DeepEP's kernels",
    "log_level": "least severe log line",
}
"""What each setting does, for --help; in its order."""

ALIASES = {
    "model-path": "model",
    "tokenizer-path": "tokenizer",
    "context-length": "max_model_len",
    "random-seed": "seed",
    "allowed-origins": "cors_origins",
    "max-running-requests": "max_num_seqs",
    "max-num-batched-tokens": "chunked_prefill_size",
    "block-size": "page_size",
    "num-gpu-blocks-override": "num_pages",
    "disable-cuda-graph": "enforce_eager",
    "cuda-graph-sizes": "cuda_graph_bs",
    "cudagraph-capture-sizes": "cuda_graph_bs",
    "ep": "ep_size",
    "expert-parallel-size": "ep_size",
    "moe-a2a-backend": "moe_dispatcher",
    "all2all-backend": "moe_dispatcher",
}
"""Words of other servers, without leading dashes; `_` and `-` are the same in all words."""
OPPOSITES = {"disable-radix-cache": "enable_prefix_caching"}
"""Words that switch a setting off, as `no-FIELD` does."""
ALL_GPUS = "enable-expert-parallel"
"""A word without a value: --ep-size with all visible GPUs."""

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


class Resolved(NamedTuple):
    """What the person asked for, from every place."""

    config: Config
    sources: dict[str, str]
    """Field to where its value came from: "flag", a variable's name or the config file's path; defaults are not listed."""
    warnings: list[str]


_Found = dict[str, tuple[Any, str]]
"""Field to its value and where that came from."""


class _Spelling(NamedTuple):
    field: str
    on: bool | None = None
    """For words that need no value: what the setting becomes with them; None for all others."""


@functools.cache
def _spellings() -> dict[str, _Spelling]:
    table = {word: _Spelling(field) for word, field in ALIASES.items()} | {_word(field): _Spelling(field) for field in HELP}
    for word, (field, _) in list(table.items()):
        if _type_of(field) is bool:
            table |= {word: _Spelling(field, True), f"no-{word}": _Spelling(field, False)}
    table |= {word: _Spelling(field, False) for word, field in OPPOSITES.items()}
    return table | {ALL_GPUS: _Spelling("ep_size", True)}


def resolve(arguments: Sequence[str], environment: Mapping[str, str]) -> Resolved:
    """Flags win over variables, variables over the config file, the file over defaults. Raises UsageError."""
    from_flags, file = _read_arguments(arguments)
    from_environment, warnings = _read_environment(environment)
    file = file or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    found = (_read_file(Path(file)) if file else {}) | from_environment | from_flags
    config = Config(**{field: value for field, (value, _) in found.items()})
    return Resolved(validate(config), {field: source for field, (_, source) in found.items()}, warnings)


def _read_arguments(arguments: Sequence[str]) -> tuple[_Found, str | None]:
    """The values that flags gave, and the config file's path."""
    found: _Found = {}
    file: str | None = None
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        written, has_value, text = (argument if argument.startswith("-") else f"--model={argument}").partition("=")
        word = _word(written.lstrip("-"))
        spelling = _spellings().get(word)
        if word != "config" and spelling is None:
            raise UsageError(_unknown(written, word, prefix="--"))
        if spelling is not None and spelling.on is not None:
            found[spelling.field] = _value(written, spelling, text if has_value else "true"), "flag"
            continue
        if not has_value:
            if not waiting or waiting[0].startswith("--"):
                raise UsageError(f"{written} needs a value")
            text = waiting.pop(0)
        if spelling is None:
            file = text
            continue
        value, (before, _) = _value(written, spelling, text), found.get(spelling.field, (None, ""))
        if isinstance(value, tuple):
            while _type_of(spelling.field) == tuple[int, ...] and waiting and waiting[0].isdecimal():
                value += _value(written, spelling, waiting.pop(0))
            value = (before or ()) + value
        if spelling.field == "model" and before not in (None, value):
            raise UsageError(f"two models given: {before!r} and {value!r}")
        found[spelling.field] = value, "flag"
    return found, file


def _read_environment(environment: Mapping[str, str]) -> tuple[_Found, list[str]]:
    """What variables gave, and a warning for each that means nothing."""
    found: _Found = {}
    warnings: list[str] = []
    for variable in sorted(environment.keys() - INTERNAL_VARIABLES):
        word, text = _word(variable.removeprefix(ENVIRONMENT_PREFIX).lower()), environment[variable]
        if not variable.startswith(ENVIRONMENT_PREFIX) or word == "config":
            continue
        if word not in _spellings():
            sentence = _unknown(variable, word, prefix=ENVIRONMENT_PREFIX)
            if word in REFUSED:
                raise UsageError(sentence)
            warnings.append(sentence)
        elif not text:
            raise UsageError(f"{variable} is set but empty; unset it or give it a value")
        else:
            spelling = _spellings()[word]
            found[spelling.field] = _value(variable, spelling, text), variable
    return found, warnings


def _read_file(path: Path) -> _Found:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"config file {path} is no TOML: {error}") from error
    found: _Found = {}
    for key, value in document.items():
        spelling = _spellings().get(_word(key))
        if spelling is None:
            raise UsageError(f"config file {path}: {_unknown(key, _word(key), prefix='')}")
        found[spelling.field] = _value(f"config file {path}, {key}", spelling, value), str(path)
    return found


def _word(written: str) -> str:
    return written.replace("_", "-")


def _value(written: str, spelling: _Spelling, value: Any) -> Any:
    """`value`, text or a TOML value, as the field's; of words that need none, it says whether they are meant at all."""
    expected = _type_of(spelling.field)
    if spelling.on is not None:
        meant = _as_bool(written, value)
        if expected is bool:
            return meant is spelling.on
        return visible_gpus() if meant else Config().ep_size
    if typing.get_origin(expected) is tuple:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        value = [part.strip() if isinstance(part, str) else part for part in parts]
    try:
        converted = msgspec.convert(value, expected, strict=False)
        msgspec.msgpack.encode(converted)  # as it will travel to the engine: in 64 bits
        return converted
    except (msgspec.ValidationError, OverflowError) as error:
        raise UsageError(f"{written}: expected {_names_of(expected)[1]}, not {value!r}") from error


def _as_bool(written: str, value: Any) -> bool:
    word = str(value).lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"{written}: expected true or false, not {value!r}")


@functools.cache
def _type_of(field: str) -> Any:
    """The field's type without `None`: nobody spells None, they leave the flag out."""
    hint = typing.get_type_hints(Config)[field]
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _names_of(expected: Any) -> tuple[str, str]:
    """A type as --help shows it, and as a complaint names it."""
    if typing.get_origin(expected) is Literal:
        return "|".join(typing.get_args(expected)), "one of " + ", ".join(typing.get_args(expected))
    names = {
        int: ("N", "a whole number"),
        float: ("X", "a number"),
        tuple[int, ...]: ("N[,N...]", "whole numbers"),
        tuple[str, ...]: ("TEXT[,TEXT...]", "text"),
    }
    return names.get(expected, ("TEXT", "text"))


def _unknown(written: str, word: str, *, prefix: str) -> str:
    """The sentence for a word that no setting has."""
    if word in REFUSED:
        return f"{written}: {REFUSED[word]}"
    near = difflib.get_close_matches(word, [*_spellings(), "config"], n=1, cutoff=0.5)
    upper = prefix == ENVIRONMENT_PREFIX
    hint = f"; did you mean {prefix}{near[0].upper().replace('-', '_') if upper else near[0]}?" if near else ""
    return f"{written} is no setting of minserve{hint}"


def usage() -> str:
    """The flags with their aliases and defaults, for --help."""
    defaults = printable(Config())
    lines = ["Usage: minserve launch [MODEL] [FLAGS]", ""]
    lines += ["Serve a checkpoint over HTTP. Every flag can be set as MINSERVE_<FLAG> or in --config FILE (TOML), too.", ""]
    for field, sentence in HELP.items():
        expected, default = _type_of(field), defaults[field]
        words = [flag_name(field), *(f"--{alias}" for alias, meant in ALIASES.items() if meant == field)]
        if expected is bool:
            words += [f"--no-{_word(field)}", *(f"--{word}" for word, meant in OPPOSITES.items() if meant == field)]
        else:
            words[-1] += f" {_names_of(expected)[0]}"
        shown = f" [{_show(default)}]" if default is not None and default != () else ""
        lines += [f"  {', '.join(words)}", f"        {sentence}{shown}"]
    lines += [f"  --{ALL_GPUS}", "        --ep-size with all visible GPUs"]
    return "\n".join([*lines, "  --config FILE", "        settings as TOML, key = value"])


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
