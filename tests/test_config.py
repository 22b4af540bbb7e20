"""Settings: defaults, checks, and every way of spelling them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from minserve import config, flags
from minserve.config import Config, validate
from minserve.errors import CheckpointError, UsageError


def resolve(*arguments: str, **environment: str) -> Config:
    return flags.resolve(arguments, environment).config


def refusal(*arguments: str, **environment: str) -> str:
    with pytest.raises(UsageError) as caught:
        flags.resolve(arguments, environment)
    return str(caught.value)


def test_no_flags_give_the_defaults() -> None:
    resolved = flags.resolve([], {"PATH": "/bin"})
    assert resolved.config == Config()
    assert resolved.sources == {}
    assert resolved.warnings == []


def test_config_survives_the_way_to_an_engine() -> None:
    sent = resolve(
        "/m", "--cuda-graph-bs", "1,2,4", "--served-model-name=a", "--max-model-len", "100", "--no-enable-prefix-caching"
    )
    assert config.decode(config.encode(sent)) == sent


def test_every_setting_has_a_flag_and_every_flag_a_setting() -> None:
    fields = [field.name for field in msgspec.structs.fields(Config)]
    assert sorted(flags.HELP) == sorted(fields)
    for field in fields:
        assert config.flag_name(field) in flags.usage()


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["/some/dir"], "model", "/some/dir"),
        (["--model", "/some/dir"], "model", "/some/dir"),
        (["--model-path=/some/dir"], "model", "/some/dir"),
        (["/some/dir", "--model", "/some/dir"], "model", "/some/dir"),
        (["--max-model-len", "77"], "max_model_len", 77),
        (["--max_model_len", "77"], "max_model_len", 77),
        (["--max_model_len=77"], "max_model_len", 77),
        (["--context-length", "77"], "max_model_len", 77),
        (["--max-running-requests", "5"], "max_num_seqs", 5),
        (["--block-size", "32"], "page_size", 32),
        (["--disable-radix-cache"], "enable_prefix_caching", False),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--no_enable_prefix_caching"], "enable_prefix_caching", False),
        (["--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--disable-cuda-graph"], "enforce_eager", True),
        (["--enforce-eager"], "enforce_eager", True),
        (["--enforce-eager=false"], "enforce_eager", False),
        (["--cuda-graph-bs", "1", "2", "4"], "cuda_graph_bs", (1, 2, 4)),
        (["--cuda-graph-bs", "1", "--port", "1", "--cuda-graph-bs", "2"], "cuda_graph_bs", (1, 2)),
        (["--moe-a2a-backend", "local"], "moe_dispatcher", "local"),
        (["--all2all-backend", "torch"], "moe_dispatcher", "torch"),
        (["--deepep-mode", "auto"], "deepep_mode", "auto"),
        (["--served-model-name", "a,b", "--served-model-name", "c"], "served_model_name", ("a", "b", "c")),
        (["--api-key", "k"], "api_key", ("k",)),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--load-format", "dummy"], "load_format", "dummy"),
        (["-ep", "1"], "ep_size", 1),
    ],
)
def test_spellings(words: list[str], field: str, value: Any) -> None:
    assert getattr(resolve(*words), field) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-modell-len", "7"], "--max-modell-len is no setting of minserve; did you mean --max-model-len?"),
        (["--zzzzqqqq"], "--zzzzqqqq is no setting of minserve"),
        (["--tp", "8"], "use --ep-size"),
        (["-tp", "8"], "use --ep-size"),
        (["--tp-size=2"], "use --ep-size"),
        (["--tensor-parallel-size", "8"], "attention is data-parallel here"),
        (["--tensor_parallel_size=8"], "attention is data-parallel here"),
        (["--pp", "2"], "use --ep-size"),
        (["--pipeline-parallel-size", "2"], "use --ep-size"),
        (["--trust-remote-code"], "never run"),
        (["--port"], "--port needs a value"),
        (["--port", "--host", "x"], "--port needs a value"),
        (["--port", "eighty"], "--port: expected a whole number, not 'eighty'"),
        (["--num-pages", "1" + "0" * 30], "--num-pages: expected a whole number, not '1000"),
        (["--port", "65536"], "--port must be between 0 and 65535"),
        (["--port", "-1"], "--port must be between"),
        (["--dtype", "int3"], "--dtype: expected one of auto, bfloat16, float16, float32"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["--max-model-len", "1"], "--max-model-len must be at least 2"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be between"),
        (["--drain-timeout", "nan"], "--drain-timeout must be at least 0"),
        (["--enforce-eager=maybe"], "--enforce-eager: expected true or false, not 'maybe'"),
        (["--cuda-graph-bs", "0"], "--cuda-graph-bs takes batch sizes of at least 1"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["a", "b"], "two models given: 'a' and 'b'"),
        (["a", "--model", "b"], "two models given"),
        (["--ep-size", "3", "--nnodes", "2"], "--ep-size 3 counts the ranks of all hosts: it must be a multiple of --nnodes 2"),
        (["--nnodes", "2"], "--ep-size 1 counts the ranks of all hosts"),
        (["--ep-size", "4", "--nnodes", "2", "--node-rank", "2"], "--node-rank 2 must be below --nnodes 2: hosts count from 0"),
        (["--ep-size", "4", "--nnodes", "2", "--master-port", "0"], "--master-port 0: with --nnodes above 1"),
        (["--deepep-mode", "low_latency"], "--deepep-mode low_latency: DeepEP moves tokens between ranks, see --ep-size"),
        (["--ep-size", "2", "--deepep-mode", "normal", "--moe-a2a-backend", "torch"], "--deepep-mode normal: DeepEP moves"),
        (["--ep-size", "2", "--moe-dispatcher", "local"], "--moe-dispatcher local sends nothing to other ranks"),
        (["--config", "/nowhere.toml"], "config file /nowhere.toml: No such file"),
    ],
)
def test_refusals_say_what_to_do(words: list[str], said: str) -> None:
    assert said in refusal(*words)


def test_expert_parallel_counts_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert flags.visible_gpus() == 4
    assert resolve("--enable-expert-parallel").ep_size == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve("--enable-expert-parallel").ep_size == 1


def test_flags_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        'port = 1\nhost = "1.1.1.1"\nmax-num-seqs = 3\ncontext_length = 50\ncuda-graph-bs = [1, 2]\nenforce_eager = true\n'
    )
    resolved = flags.resolve(["--config", str(file), "--port", "3"], {"MINSERVE_PORT": "2", "MINSERVE_HOST": "2.2.2.2"})
    got = resolved.config
    assert (got.port, got.host, got.max_num_seqs, got.max_model_len, got.page_size) == (3, "2.2.2.2", 3, 50, 64)
    assert got.cuda_graph_bs == (1, 2)
    assert got.enforce_eager
    assert resolved.sources["port"] == "flag"
    assert resolved.sources["host"] == "MINSERVE_HOST"
    assert resolved.sources["max_num_seqs"] == str(file)
    shown = flags.table(resolved)
    assert len(shown.splitlines()) == len(flags.HELP)
    assert "MINSERVE_HOST" in shown


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("port = 4\n")
    assert resolve(MINSERVE_CONFIG=str(file)).port == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "prot is no setting of minserve; did you mean port?"),
        ("[server]\nport = 1", "server is no setting of minserve"),
        ("port = true", "port: expected a whole number, not True"),
        ("port = [1]", "port: expected a whole number"),
        ('enforce-eager = "perhaps"', "expected true or false"),
        ("tp = 8", "use --ep-size"),
        ("port = ", "is no TOML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    message = refusal("--config", str(file))
    assert said in message
    assert str(file) in message


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("MINSERVE_CONTEXT_LENGTH", "9", "max_model_len", 9),
        ("MINSERVE_DISABLE_RADIX_CACHE", "1", "enable_prefix_caching", False),
        ("MINSERVE_DISABLE_RADIX_CACHE", "false", "enable_prefix_caching", True),
        ("MINSERVE_ENFORCE_EAGER", "yes", "enforce_eager", True),
        ("MINSERVE_API_KEY", "a,b", "api_key", ("a", "b")),
        ("MINSERVE_MODEL", "/m", "model", "/m"),
    ],
)
def test_variables(variable: str, text: str, field: str, value: Any) -> None:
    assert getattr(resolve(**{variable: text}), field) == value


def test_an_unknown_variable_is_a_warning_with_the_nearest_match() -> None:
    (warning,) = flags.resolve([], {"MINSERVE_PROT": "1", "MINSERVE_ENGINE_FD": "5"}).warnings
    assert warning == "MINSERVE_PROT is no setting of minserve; did you mean MINSERVE_PORT?"


@pytest.mark.parametrize("words", [["--stack", "hopper"], ["--ep-size", "2"]])
def test_deterministic_is_a_stack_of_its_own(words: list[str]) -> None:
    assert resolve("--deterministic").deterministic
    assert "leave --stack and --ep-size away" in refusal("--deterministic", *words)


def test_a_bad_variable_is_refused() -> None:
    assert "MINSERVE_PORT: expected a whole number" in refusal(MINSERVE_PORT="x")
    assert "MINSERVE_API_KEY is set but empty" in refusal(MINSERVE_API_KEY="")
    assert "use --ep-size" in refusal(MINSERVE_TP="2")


def test_no_key_is_ever_shown() -> None:
    resolved = flags.resolve(["--api-key", "hunter2"], {})
    assert "hunter2" not in flags.table(resolved)
    assert "hunter2" not in str(config.printable(resolved.config))
    assert "***" in flags.table(resolved)


def test_the_shipped_config_file_is_accepted() -> None:
    file = Path(__file__).parent.parent / "configs" / "tiny-cpu.toml"
    assert resolve("--config", str(file)).model == config.EMBEDDED_MODEL


def test_model_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        config.model_directory(Config(model="/nowhere/at/all"))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        config.model_directory(Config(model=str(tmp_path)))
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="is a file"):
        config.model_directory(Config(model=str(file)))
    assert config.model_directory(Config(model=str(tmp_path))) == tmp_path
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        config.model_directory(Config(model="x" * 5000))


def test_validate_returns_the_config() -> None:
    assert validate(Config(port=1)) == Config(port=1)
