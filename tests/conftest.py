"""Fixtures for all rooms. Nothing heavy is imported before a test asks for it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tiny_checkpoints import TinyCheckpoint

hypothesis.settings.load_profile("ci")
"""The same examples in every run, however slow the machine; `--hypothesis-profile=default` looks for others."""


def pytest_runtest_setup() -> None:
    """Every test's random numbers are its own: which tests share a process, and in what order, differs from run to run."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyCheckpoint]:
    """`tiny(variant)`: the variant's folder, with a tokenizer, and transformers' model of it; made once a session."""
    import torch
    from tiny_checkpoints import TinyCheckpoint, reference_model, save_checkpoint

    torch.set_num_threads(1)
    made: dict[str, TinyCheckpoint] = {}

    def get(name: str) -> TinyCheckpoint:
        if name not in made:
            reference = reference_model(name)
            directory = save_checkpoint(name, reference, tmp_path_factory.mktemp(name) / "model", tokenizer=True)
            made[name] = TinyCheckpoint(name, directory, reference)
        return made[name]

    return get


@pytest.fixture(scope="session")
def tiny_dir(tiny: Callable[[str], TinyCheckpoint]) -> Callable[[str], Path]:
    """`tiny_dir(variant)`: the folder alone."""
    return lambda name: tiny(name).directory
