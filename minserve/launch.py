"""The process tree: one front (this process), one engine process per rank, started together and ending together.

Knows sockets, signals and exit codes; nothing of HTTP or torch.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from minserve import config as configuration
from minserve import process_ends
from minserve import seat as seats
from minserve.config import Config
from minserve.errors import EnvironmentFault, ExitCode
from minserve.messages import frame
from minserve.seat import ALONE, Seat

ENGINE_MODULE = "minserve.runtime"
MOCK_ENGINE_MODULE = "minserve.runtime.mock_engine"
LISTEN_BACKLOG = 4096
"""Connections that may wait for the front; the kernel caps it at net.core.somaxconn."""
_ENGINE_LEAVES_WITHIN = 2.0
"""Seconds an engine gets to leave after its socket is closed, before it is killed."""
_LIBRARY_FOLDERS = ("nvshmem/lib", "nccl/lib")
"""Below the `nvidia` packages: libraries that vendor kernels look for by name only."""
_COMPILER_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Each compiler's variable, and its folder below --kernel-cache."""

log = logging.getLogger("minserve.launch")

_ByRank = dict[int, subprocess.Popen[bytes]]


def run(config: Config, engine_module: str | None = None) -> int:
    """Serve until told to stop; the process's exit code. Raises ServerError for what fails before the engine runs."""
    _keep_standard_streams()
    _raise_open_files_limit()
    process_ends.leave_on_sigterm()
    module = engine_module or (ENGINE_MODULE if config.mock_engine is None else MOCK_ENGINE_MODULE)
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(bind(config.host, config.port, shared=config.front_workers > 1))]
        for _ in range(1, config.front_workers):
            listeners.append(opened.enter_context(_bind_beside(listeners[0])))
        configuration.model_directory(config)
        with _engines(config, module) as (engines, connections):
            log.info("listening on %s; /ready answers 200 once the model is loaded", _url(listeners[0]))
            code = _serve(config, connections, listeners)
            process_ends.leave_on_sigterm()  # serve drained on signals and has given them back
            if code == ExitCode.RANK_DIED:
                for cause in _causes_of_death(engines):
                    log.error("%s", cause)
    return code


def _serve(config: Config, connections: list[list[socket.socket]], listeners: list[socket.socket]) -> ExitCode:
    """The front's own work. What it needs is imported only now, while the engines import torch: they take longer."""
    # Signals wait: an import may swallow what they raise, and one would leave the event loop half made.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, process_ends.SIGNALS)
    import asyncio

    from minserve import front_workers
    from minserve.server.app import serve

    if config.front_workers > 1:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return front_workers.run(config, connections, listeners)
    return asyncio.run(serve(config, connections[0], listeners[0]))


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; with `shared` others of this user may be bound beside it.

    Raises EnvironmentFault with what to do when the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise EnvironmentFault(f"--host {host} cannot be resolved: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if shared:  # only now: a port that another server has must still be found busy
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise EnvironmentFault(_bind_sentence(host, port, error)) from error
    return listener


def _bind_beside(first: socket.socket) -> socket.socket:
    """Another listening socket on the same address: the kernel spreads connections over both."""
    listener = socket.socket(first.family, first.type, first.proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(first.getsockname())
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise EnvironmentFault(f"--front-workers needs several sockets on one port: {error.strerror}") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _bind_sentence(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another process; stop that one or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine; 127.0.0.1 serves this machine only, 0.0.0.0 every network"
    return f"cannot listen on {host} port {port}: {error.strerror}"


@contextlib.contextmanager
def _engines(config: Config, module: str) -> Iterator[tuple[_ByRank, list[list[socket.socket]]]]:
    """This host's engine processes by rank, and of each worker its sockets to them. On leaving, they are gone."""
    with contextlib.ExitStack() as all_of_them:
        processes, by_rank = {}, []
        with _seats(config) as own:
            for seat in own:
                processes[seat.rank], connections = all_of_them.enter_context(_engine(config, module, seat))
                by_rank.append(connections)
        try:
            yield processes, [list(of_worker) for of_worker in zip(*by_rank, strict=True)]
        finally:
            for connections in by_rank:  # they all leave now, and not one after the other
                for connection in connections:
                    connection.close()
            deadline = time.monotonic() + _ENGINE_LEAVES_WITHIN
            for rank, process in processes.items():
                _end(process, rank, deadline)


@contextlib.contextmanager
def _seats(config: Config) -> Iterator[list[Seat]]:
    """Of this host's ranks. Raises EnvironmentFault when the port where ranks meet cannot be had."""
    if config.ep_size == 1:
        yield [ALONE]
        return
    ranks = config.local_ranks
    address, port = ("127.0.0.1", 0) if config.nnodes == 1 else (config.master_addr, config.master_port)
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(_meeting_point(address, port)) if 0 in ranks else None
        yield seats.host_seats(ranks, config.ep_size, address, port, listener)


def _meeting_point(address: str, port: int) -> socket.socket:
    """Bound here and now: a port that is chosen first and used later may be lost in between."""
    try:
        return socket.create_server((address, port), backlog=LISTEN_BACKLOG)
    except OSError as error:
        reason = "is in use by another process" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
        raise EnvironmentFault(f"--master-addr {address} --master-port {port} {reason}") from error


@contextlib.contextmanager
def _engine(config: Config, module: str, seat: Seat = ALONE) -> Iterator[tuple[subprocess.Popen[bytes], list[socket.socket]]]:
    """One rank's engine process and the front's ends of its sockets, one a worker. On leaving, the engine is gone."""
    with contextlib.ExitStack() as ours:
        connections: list[socket.socket] = []
        with contextlib.ExitStack() as theirs:
            descriptors: list[int] = []
            for _ in range(config.front_workers):
                near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                connections.append(ours.enter_context(near))
                descriptors.append(theirs.enter_context(far).fileno())
            told = {seats.DESCRIPTOR_VARIABLE: ",".join(map(str, descriptors)), seats.SEAT_VARIABLE: seats.encode(seat)}
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, config.device],
                env=engine_environment(config, seat) | told,
                pass_fds=[*descriptors, *([] if seat.listener is None else [seat.listener])],
                stdin=subprocess.DEVNULL,
                preexec_fn=functools.partial(process_ends.die_with, os.getpid()),
                process_group=0,  # a terminal's Ctrl-C reaches the front alone, which then ends the engine in order
            )
        try:
            with contextlib.suppress(OSError):  # an engine that is dead already is told by EOF
                connections[0].sendall(frame(configuration.encode(config)))
            yield process, connections
        finally:
            ours.close()
            _end(process, seat.rank, time.monotonic() + _ENGINE_LEAVES_WITHIN)


def run_module(module: str, words: Sequence[str]) -> int:
    """A program of the engine's side, in a process and an environment like the engine's; its exit code."""
    return subprocess.run([sys.executable, "-P", "-m", module, *words], env=engine_environment(Config()), check=False).returncode


def _end(process: subprocess.Popen[bytes], rank: int, deadline: float) -> None:
    """Wait for an engine whose socket is closed; kill it when it does not leave."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        log.info("engine %d (pid %d) was killed: it did not leave within %g s", rank, process.pid, _ENGINE_LEAVES_WITHIN)


def _causes_of_death(engines: _ByRank) -> list[str]:
    """Of engines that ended without a last word; those that only followed another's end are left out."""
    causes = [(engine, _cause_of_death(engine, rank)) for rank, engine in engines.items()]
    own = [cause for engine, cause in causes if engine.returncode not in (ExitCode.OK, ExitCode.RANK_DIED)]
    return own or [cause for _, cause in causes]


def _cause_of_death(process: subprocess.Popen[bytes], rank: int = 0) -> str:
    """How an engine ended that said no last word."""
    try:
        code = process.wait(2.0)
    except subprocess.TimeoutExpired:
        return f"engine {rank} (pid {process.pid}) closed its connection but still runs"
    if code >= 0:
        return f"engine {rank} (pid {process.pid}) ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
    return f"engine {rank} (pid {process.pid}) was killed by {name}{hint}"


def engine_environment(config: Config, seat: Seat = ALONE) -> dict[str, str]:
    """The engine's variables. Library paths must be there before exec: the dynamic linker reads them once."""
    environment = kernel_cache_variables(config) | _shared_host_variables(seat)
    environment |= os.environ  # what the person has set stays
    # -P keeps the working directory, where anything may lie, out of the engine's imports; the package itself stays found.
    ours = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), ours]))
    environment |= bytecode_variables(config)
    if folders := vendor_library_folders():
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([*folders, *filter(None, [environment.get("LD_LIBRARY_PATH")])])
    return environment


def kernel_cache_variables(config: Config) -> dict[str, str]:
    """Where the kernel compilers keep their results: one folder, so that a second start compiles nothing."""
    folder = configuration.kernel_cache_directory(config)
    return {variable: str(folder / name) for variable, name in _COMPILER_CACHES.items()}


def bytecode_variables(config: Config) -> dict[str, str]:
    """Images often come without Python's bytecode and forbid to write it beside the modules; then each start would compile
    thousands of them. It is kept with the compiled kernels instead."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.cached is None or Path(torch.cached).exists():
        return {}
    if not sys.dont_write_bytecode and os.access(Path(torch.cached).parent.parent, os.W_OK):
        return {}  # the first start writes it where it belongs
    return {
        "PYTHONPYCACHEPREFIX": str(configuration.kernel_cache_directory(config) / "python"),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def _shared_host_variables(seat: Seat) -> dict[str, str]:
    """Ranks of one host share its cores; all talk over the interface on which they meet, whatever a host's name resolves to."""
    if seat.num_ranks == 1:
        return {}
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // seat.ranks_per_host))}
    interface = seats.interface_towards(seat.address, seat.port)
    return threads | ({} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface})


def vendor_library_folders() -> list[str]:
    """Folders of the installed NVSHMEM and NCCL packages; none on a machine without them."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [str(path) for root in roots for folder in _LIBRARY_FOLDERS if (path := Path(root) / folder).is_dir()]


def _keep_standard_streams() -> None:
    """Fill the places of closed standard streams, else a socket would get number 1 and be written to as output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _raise_open_files_limit() -> None:
    """Every connection is an open file; shells start processes with a soft limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
