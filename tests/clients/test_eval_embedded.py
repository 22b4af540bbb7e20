"""The eval against a real server of the embedded model."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from rich.console import Console
from server_process import serving

from minserve.clients.eval import run_arithmetic
from minserve.errors import ExitCode


def test_the_embedded_model_passes_its_gate(tmp_path: Path) -> None:
    written = io.StringIO()
    with serving(log=tmp_path / "log") as server:
        code = asyncio.run(run_arithmetic(server.base_url, limit=12, console=Console(file=written, width=300)))
    lines = written.getvalue().splitlines()
    assert code is ExitCode.OK, written.getvalue()
    assert lines[-1] == "accuracy 1.000"
    assert len([line for line in lines if "drift 0.0000" in line]) == 4, written.getvalue()
