"""Dockerfile, compose.yaml and the Kubernetes example say only what the server understands."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from minserve.config import Config
from minserve.flags import resolve

ROOT = Path(__file__).parent.parent


def settings(words: list[str], variables: dict[str, str] | None = None) -> Config:
    resolved = resolve(words, variables or {})
    assert not resolved.warnings
    return resolved.config


def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text().replace("\\\n", " ")


def test_the_image_listens_for_everyone_and_keeps_its_kernels() -> None:
    pairs = [pair for line in re.findall(r"^ENV (.*)$", dockerfile(), re.MULTILINE) for pair in line.split()]
    variables = dict(pair.split("=", 1) for pair in pairs if pair.startswith("MINSERVE_"))
    config = settings([], variables)
    assert config.host == "0.0.0.0" and config.kernel_cache == "/var/cache/minserve"


def test_the_image_runs_the_server_itself_without_root() -> None:
    final = dockerfile().rpartition("\nFROM ")[2]
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", final, re.MULTILINE)[0]) == ["minserve"]  # no shell eats the signals
    assert json.loads(re.findall(r"^CMD (.*)$", final, re.MULTILINE)[-1]) == ["launch"]
    assert final.index("\nUSER 1000") > final.index("useradd --create-home --uid 1000")
    assert "/ready" in re.findall(r"HEALTHCHECK (.*)$", final, re.MULTILINE)[0]


def test_the_image_installs_the_pins_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "[hopper,deepep,hub,plot]" in dockerfile() and {"hopper", "deepep", "hub", "plot"} <= set(extras)
    assert all("==" in pin for pin in extras["hopper"] + extras["deepep"])


def test_compose_starts_a_rank_for_each_gpu() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["minserve"]
    filled = [
        re.sub(r"\$\{MODEL[^}]*\}", "/models/x", re.sub(r"\$\{EP_SIZE:-(\d+)\}", r"\1", word)) for word in service["command"]
    ]
    assert filled[0] == "launch"
    config = settings(filled[1:])
    assert (config.model, config.ep_size) == ("/models/x", 8)
    assert service["ipc"] == "host" and service["ulimits"]["memlock"] == -1
    assert float(service["stop_grace_period"].rstrip("s")) > config.drain_timeout


def test_kubernetes_starts_both_nodes_of_one_group() -> None:
    group, service = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "two-nodes.yaml").read_text())
    template: dict[str, Any] = group["spec"]["leaderWorkerTemplate"]
    pod = template["workerTemplate"]["spec"]
    (container,) = pod["containers"]
    for node in range(template["size"]):
        words = [
            word.replace("$(LWS_WORKER_INDEX)", str(node))
            .replace("$(LWS_LEADER_ADDRESS)", "leader")
            .replace("/opt/minserve", str(ROOT))
            for word in container["args"]
        ]
        assert words[0] == "launch"
        config = settings(words[1:])
        assert (config.node_rank, config.nnodes, config.ep_size) == (
            node,
            2,
            container["resources"]["limits"]["nvidia.com/gpu"] * 2,
        )
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + config.drain_timeout
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["ports"][0]["containerPort"] == config.port
    assert service["spec"]["selector"] == template["workerTemplate"]["metadata"]["labels"]
