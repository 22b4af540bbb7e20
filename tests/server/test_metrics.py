"""The metrics page: names, labels, and numbers that agree with what happened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from prometheus_client.parser import text_string_to_metric_families

from minserve.messages import StepStats
from minserve.server.metrics import _summed_pages
from tests.server.conftest import Edge

Start = Callable[..., AbstractContextManager[Edge]]

NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_count",
    "time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count",
    "request_queue_time_seconds_count",
    "inter_token_latency_seconds_count",
    "graph_replay_total",
    "eager_decode_steps_total",
    "last_decode_age_seconds",
    "nan_rows_total",
    "aborts_total",
    "startup_seconds",
]


def test_every_name_is_there_with_the_models_name(start_edge: Start) -> None:
    with start_edge("abc") as edge:
        edge.complete()
        stats = StepStats(
            num_running=3,
            num_waiting=2,
            used_pages=1 << 19,
            prefix_cache_queries=10,
            prefix_cache_hits=4,
            num_preemptions=1,
            eager_decode_steps={"too large": 7},
            graph_replays={8: 5, 16: 6},
            nan_rows=9,
        )
        edge.engine.stats = stats
        edge.wait_for(lambda: edge.metric("num_requests_running") == 3)
        answer = edge.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    samples = {
        sample.name: sample for family in text_string_to_metric_families(answer.body.decode()) for sample in family.samples
    }
    for name in NAMES:
        assert samples[f"minserve:{name}"].labels["model_name"] == "tiny"
    values = {name.removeprefix("minserve:"): sample.value for name, sample in samples.items()}
    assert values["num_requests_waiting"] == 2
    assert values["kv_cache_usage_perc"] == 0.5
    assert (values["prefix_cache_queries_total"], values["prefix_cache_hits_total"]) == (10, 4)
    assert (values["num_preemptions_total"], values["nan_rows_total"]) == (1, 9)
    assert samples["minserve:eager_decode_steps_total"].labels["reason"] == "too large"
    assert samples["minserve:startup_seconds"].labels["phase"] == "load"


def test_counts_agree_with_what_was_served(start_edge: Start) -> None:
    with start_edge("abc") as edge:
        edge.complete([1, 2, 3], n=2)
        edge.complete("xy", max_tokens=2, stream=True)
        edge.complete("x", max_tokens=0)
        assert edge.metric("prompt_tokens_total") == 3 + 3
        assert edge.metric("generation_tokens_total") == 4 + 4 + 2
        assert edge.metric("request_success_total", finished_reason="stop") == 2
        assert edge.metric("request_success_total", finished_reason="length") == 1
        assert edge.metric("time_to_first_token_seconds_count") == 3
        assert edge.metric("inter_token_latency_seconds_count") == 3 + 3 + 1
        assert edge.metric("time_per_output_token_seconds_count") == 3
        assert edge.metric("e2e_request_latency_seconds_count") == 3
        assert edge.metric("request_queue_time_seconds_count") == 3
        assert edge.metric("aborts_total") == 0


def test_pages_of_several_workers_are_summed() -> None:
    page = b'# HELP a:x_total Things\n# TYPE a:x_total counter\na:x_total{m="t"} 2.0\n'
    other = page.replace(b"2.0", b"3.5")
    assert _summed_pages([page, other]) == page.replace(b"2.0", b"5.5")
    assert _summed_pages([page]) == page
