"""The parts of the process tree that need no model: addresses, an engine's beginning and end, standard streams, limits."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import PATIENCE

from minserve import launch
from minserve.config import Config
from minserve.errors import EnvironmentFault, ExitCode


def test_a_free_port_is_bound_and_listens() -> None:
    with launch.bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), timeout=PATIENCE):
        pass


def test_a_name_and_ipv6_are_addresses_too() -> None:
    with launch.bind("localhost", 0) as listener:
        assert listener.getsockname()[1] > 0
    if Path("/proc/net/if_inet6").exists() and Path("/proc/net/if_inet6").read_text():
        with launch.bind("::1", 0) as listener:
            assert listener.family == socket.AF_INET6


def test_a_busy_port_is_named_with_what_to_do() -> None:
    with launch.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=rf"port {port} on 127\.0\.0\.1 is in use.*--port"):
            launch.bind("127.0.0.1", port)


def test_a_foreign_address_and_a_nonsense_name_are_refused() -> None:
    with pytest.raises(EnvironmentFault, match="no address of this machine"):
        launch.bind("192.0.2.1", 0)
    with pytest.raises(EnvironmentFault, match="cannot be resolved"):
        launch.bind("no such host", 0)


@pytest.fixture
def fake_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes `-m fake_engine` run the source that the test writes to `fake_engine.py` in tmp_path."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "_ENGINE_LEAVES_WITHIN", PATIENCE)
    return "fake_engine"


READ_CONFIG = """
import os, signal, socket, sys, time
from minserve import config
from minserve.messages import FrameReader
connection = socket.socket(fileno=int(os.environ["MINSERVE_ENGINE_FD"]))
reader, bodies = FrameReader(), []
while not bodies:
    bodies = reader.feed(connection.recv(65536))
received = config.decode(bodies[0])
"""


def test_the_first_frame_is_the_config_and_eof_the_end(tmp_path: Path, fake_engine: str) -> None:
    (tmp_path / "fake_engine.py").write_text(
        READ_CONFIG + "connection.sendall(repr((received.port, received.model)).encode())\nsys.exit(len(connection.recv(1)))\n"
    )
    with launch._engine(Config(port=77, model="/m"), fake_engine) as (process, (connection,)):
        assert connection.recv(100) == b"(77, '/m')"
        assert process.poll() is None
    assert process.returncode == 0


def test_an_engine_that_does_not_leave_is_killed(tmp_path: Path, fake_engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_engine.py").write_text(
        READ_CONFIG + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nconnection.sendall(b'up')\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(launch, "_ENGINE_LEAVES_WITHIN", 0.2)
    with launch._engine(Config(), fake_engine) as (process, (connection,)):
        assert connection.recv(2) == b"up"
    assert process.returncode == -signal.SIGKILL


def test_an_engine_that_cannot_even_start_does_not_break_the_front(fake_engine: str) -> None:
    with launch._engine(Config(), fake_engine) as (process, _):
        process.wait(PATIENCE)
        assert launch._cause_of_death(process) == f"engine 0 (pid {process.pid}) ended with exit code 1"


def test_the_cause_of_death_names_the_signal(tmp_path: Path, fake_engine: str) -> None:
    (tmp_path / "fake_engine.py").write_text(READ_CONFIG + "connection.sendall(b'up')\ntime.sleep(60)\n")
    with launch._engine(Config(), fake_engine) as (process, (connection,)):
        assert connection.recv(2) == b"up"
        process.kill()
        assert connection.recv(1) == b""
        assert launch._cause_of_death(process).startswith(f"engine 0 (pid {process.pid}) was killed by SIGKILL")


def test_a_later_host_names_its_engines_by_their_rank_in_the_group(tmp_path: Path, fake_engine: str) -> None:
    (tmp_path / "fake_engine.py").write_text("import os, sys; sys.exit('\"rank\":9' in os.environ['MINSERVE_ENGINE_SEAT'])")
    second = Config(ep_size=12, nnodes=3, node_rank=2)
    with launch._engines(second, fake_engine) as (engines, _):
        assert list(engines) == [8, 9, 10, 11]
        for engine in engines.values():
            engine.wait(PATIENCE)
        assert launch._causes_of_death(engines) == [f"engine 9 (pid {engines[9].pid}) ended with exit code 1"]


def test_vendor_libraries_are_found_where_their_packages_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("nvshmem/lib", "nccl/lib", "cublas/lib"):
        (tmp_path / "nvidia" / folder).mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [str(tmp_path / "nvidia" / "nvshmem" / "lib"), str(tmp_path / "nvidia" / "nccl" / "lib")]
    assert [folder for folder in launch.vendor_library_folders() if folder.startswith(str(tmp_path))] == found
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    path = launch.engine_environment(Config())["LD_LIBRARY_PATH"].split(":")
    assert path[-1] == "/before"
    assert set(found) <= set(path)


def test_the_soft_limit_of_open_files_is_raised() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "from minserve import launch; launch._raise_open_files_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert int(done.stdout) == hard


def test_a_closed_standard_stream_is_never_taken_by_a_socket() -> None:
    code = (
        "import os; os.close(0); os.close(1)\n"
        "from minserve import launch; launch._keep_standard_streams()\n"
        "import socket, sys; a, b = socket.socketpair()\n"
        "sys.exit(0 if min(a.fileno(), b.fileno()) > 2 and os.get_inheritable(1) else 1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


def test_exit_codes_are_the_documented_numbers() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "INTERNAL": 1,
        "USAGE": 2,
        "ENVIRONMENT": 3,
        "CHECKPOINT": 4,
        "MEMORY": 5,
        "RANK_DIED": 6,
        "SELF_CHECK": 7,
        "INTERRUPTED": 130,
    }


def test_no_engine_outlives_a_front_that_raises(tmp_path: Path, fake_engine: str) -> None:
    (tmp_path / "fake_engine.py").write_text(READ_CONFIG + "connection.recv(1)\n")
    started: list[subprocess.Popen[bytes]] = []

    def front_fails() -> None:
        with launch._engine(Config(), fake_engine) as (process, _):
            started.append(process)
            raise RuntimeError("the front broke")

    with pytest.raises(RuntimeError, match="the front broke"):
        front_fails()
    assert not psutil.pid_exists(started[0].pid)
    assert started[0].returncode == 0, "it left by itself"
