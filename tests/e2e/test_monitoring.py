"""The Grafana dashboard and the alerts ask for metrics that a live server has, in words that Prometheus understands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server_process import serving

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "minserve.json"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool on this machine (Debian: apt-get install prometheus)")


def dashboard_expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def promtool(*words: str, cwd: Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_and_label_asked_for_is_one_of_a_live_server(tmp_path: Path) -> None:
    text = DASHBOARD.read_text() + ALERTS.read_text()
    asked = [*dashboard_expressions(), *(rule["expr"] for rule in alert_rules())]
    names = set(re.findall(r"minserve:\w+", " ".join(asked)))
    assert len(names) > 20
    labels = {label.strip() for group in re.findall(r"by \(([\w, ]+)\)", text) for label in group.split(",")}
    labels |= set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", text))
    with serving("--ep-size", "2", log=tmp_path / "log") as server:
        body = {"messages": [{"role": "user", "content": "What is 23 + 58?"}], "temperature": 0}
        assert server.request("POST", "/v1/chat/completions", body)[0] == 200
        page = server.request("GET", "/metrics")[1]
    families = list(text_string_to_metric_families(page))
    samples = [sample for family in families for sample in family.samples]
    there = {sample.name for sample in samples}
    there |= {f"{family.name}_total" for family in families if family.type == "counter"}  # none of a label's values yet
    assert names - there == set()
    of_a_scrape, without_samples = {"instance"}, {"bs"}  # graphs are replayed on GPUs alone
    assert labels - of_a_scrape - without_samples - {label for sample in samples for label in sample.labels} == set()


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(dashboard_expressions()))) - {"__rate_interval"}
    assert used <= variables


@needs_promtool
def test_prometheus_understands_every_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$__\w+", "5m", expression)}
        for number, expression in enumerate(dashboard_expressions())
    ]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", "panels.yml", cwd=tmp_path)
    promtool("check", "config", "prometheus.yml", cwd=ALERTS.parent)


@needs_promtool
def test_alerts_fire_when_they_should_and_not_before() -> None:
    promtool("test", "rules", "alerts_test.yml", cwd=ALERTS.parent)


def test_each_alert_has_its_paragraph() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    for rule in alert_rules():
        assert f"`{rule['alert']}`" in text
