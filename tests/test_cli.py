"""The command line as a person meets it: words in, text and exit code out."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from typer.testing import CliRunner
from waiting import PATIENCE

from minserve import __version__, cli, launch
from minserve.config import Config
from minserve.errors import CheckpointError, ExitCode


def minserve(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "minserve", *words], capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configs that `launch.run` was called with; it serves nothing and exits 0."""
    configs: list[Config] = []

    def run(config: Config) -> int:
        configs.append(config)
        return ExitCode.OK

    monkeypatch.setattr(launch, "run", run)
    for variable in ("MINSERVE_PORT", "MINSERVE_MODEL"):
        monkeypatch.delenv(variable, raising=False)
    return configs


def test_version() -> None:
    done = minserve("version")
    assert (done.returncode, done.stdout) == (0, f"minserve {__version__}\n")


def test_help_lists_every_command_and_launch_help_every_flag() -> None:
    done = minserve("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("launch", "eval", "version"))
    done = minserve("launch", "--help")
    assert done.returncode == 0
    assert "--max-model-len, --context-length N" in done.stdout
    assert "--disable-radix-cache" in done.stdout


def test_no_command_shows_the_help_and_a_wrong_one_exits_2() -> None:
    assert "launch" in minserve().stdout + minserve().stderr
    wrong = minserve("lunch")
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="its modules would be compiled")
def test_prebuild_without_flashinfer_says_what_is_missing() -> None:
    done = minserve("prebuild")
    assert done.returncode == ExitCode.ENVIRONMENT
    assert done.stderr.startswith("minserve: error: FlashInfer is not installed")


def test_launch_hands_over_one_config(launched: list[Config]) -> None:
    result = CliRunner().invoke(cli.app, ["launch", "/some/model", "--max_model_len", "9", "--port=7", "--disable-radix-cache"])
    assert result.exit_code == 0
    assert launched == [Config(model="/some/model", max_model_len=9, port=7, enable_prefix_caching=False)]


def test_an_engine_starts_before_the_front_imports_its_server() -> None:
    """That takes half a second, as long as nothing else is waited for."""
    code = "import sys, minserve.cli; print([name for name in ('asyncio', 'aiohttp', 'minserve.server') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_launch_without_words_serves_the_embedded_model(launched: list[Config]) -> None:
    assert CliRunner().invoke(cli.app, ["launch"]).exit_code == 0
    assert launched == [Config()]


def test_the_exit_code_of_launch_is_the_process_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run", lambda _: ExitCode.RANK_DIED)
    assert CliRunner().invoke(cli.app, ["launch"]).exit_code == 6


def test_a_server_error_is_its_sentence_and_its_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: Config) -> int:
        raise CheckpointError("shard 3 is missing")

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(sys, "argv", ["minserve", "launch", "--log-level", "error"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 4
    assert capsys.readouterr().err == "minserve: error: shard 3 is missing\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp", "8"], "--tp: attention is data-parallel here, use --ep-size"),
        (["-tp", "8"], "attention is data-parallel here"),
        (["--tensor-parallel-size=8"], "attention is data-parallel here"),
        (["--port"], "--port needs a value"),
        (["--ep-size", "4", "--moe-dispatcher", "local"], "sends nothing to other ranks"),
    ],
)
def test_refused_words_exit_2_with_one_sentence(words: list[str], said: str) -> None:
    done = minserve("launch", *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_settings_are_logged_with_their_sources(
    launched: list[Config], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MINSERVE_PORT", "17")
    monkeypatch.setenv("MINSERVE_PROT", "18")
    monkeypatch.setenv("MINSERVE_API_KEY", "hunter2")
    with caplog.at_level("INFO"):
        assert CliRunner().invoke(cli.app, ["launch"]).exit_code == 0
    assert launched[0].port == 17
    assert "did you mean MINSERVE_PORT?" in caplog.text
    (settings,) = (record.getMessage() for record in caplog.records if "with these settings" in record.getMessage())
    assert [line.split() for line in settings.splitlines() if line.split()[0] == "port"] == [["port", "17", "MINSERVE_PORT"]]
    assert "hunter2" not in caplog.text
