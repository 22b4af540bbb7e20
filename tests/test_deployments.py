"""The deployments in configs/: each resolves into a Config, and the plan says that it fits the GPUs in its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minserve.flags import resolve
from minserve.plan import make_plan, read_config

CONFIGS = Path(__file__).parent.parent / "configs"
SHAPES = {
    "deepseek-v3-8xh200": "deepseek-v3",
    "kimi-k2-16xh200": "kimi-k2-instruct",
    "kimi-k2-thinking-8xh200": "kimi-k2-thinking",
    "qwen3-30b-a3b-1xh200": "qwen3-30b-a3b",
    "qwen3-235b-a22b-fp8-8xh200": "qwen3-235b-a22b-fp8",
    "moonlight-1xh200": "moonlight-16b-a3b",
}


def test_every_deployment_is_known_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == {*SHAPES, "tiny-cpu"}


def test_the_cpu_one_resolves() -> None:
    assert resolve(["--config", str(CONFIGS / "tiny-cpu.toml")], {}).config.device == "cpu"


@pytest.mark.parametrize("name", SHAPES)
def test_it_fits_the_gpus_in_its_name(name: str) -> None:
    file = CONFIGS / f"{name}.toml"
    config = resolve(["--config", str(file)], {}).config
    gpus = int(re.findall(r"(\d+)xh200", name)[0])
    assert config.ep_size == gpus and config.nnodes * 8 >= gpus
    document, notes = read_config(CONFIGS / "shapes" / SHAPES[name])
    made = make_plan(document, config, notes)
    assert made.fits, made
    assert f"configs/shapes/{SHAPES[name]} " in file.read_text()
