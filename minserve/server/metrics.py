"""What the front measures and what engines report, as Prometheus text. Knows nothing of HTTP.

Names carry vLLM's suffixes, so that dashboards made for it need a change of prefix only.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from minserve.server.engine_pool import EnginePool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_GAUGES = {
    "num_requests_running": ("Requests in the batch.", "num_running"),
    "num_requests_waiting": ("Requests in the queue.", "num_waiting"),
}
"""Name to description and member of StepStats; summed, and by rank."""
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up.",
    "prefix_cache_hits": "Prompt tokens found.",
    "num_preemptions": "Requests pushed out for lack of pages.",
    "nan_rows": "Rows of logits that were not finite.",
    "mixed_steps": "Steps that read prompts, with or without decode rows.",
}
"""Member of StepStats to description; summed over ranks."""
_RANK_COUNTERS = {"steps": "Steps with requests of this rank.", "dummy_steps": "Steps for other ranks alone."}
_Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


class Metrics:
    """Counts and histograms of one front; `engines` is read when the page is asked for.

    The library's own counters walk over buckets and take locks, which is too dear for every token: it only writes the page.
    """

    def __init__(self, prefix: str, model_name: str, engines: EnginePool, page_counts: list[int], startup: Mapping[str, float]):
        """`page_counts`: KV pages of each rank. `startup`: phase name to seconds."""
        self._prefix, self._model_name = prefix, model_name
        self._engines = engines
        self._page_counts = page_counts
        self._startup = startup
        self.prompt_tokens = self.generation_tokens = 0
        self.successes = dict.fromkeys(("stop", "length"), 0)
        self.aborts = dict.fromkeys(("client_gone", "slow_reader", "api", "drain", "error"), 0)
        """Sequences by the cause of their early end."""
        self.time_to_first_token = _Histogram(_FIRST_TOKEN_BUCKETS)
        self.inter_token_latency = _Histogram(_TOKEN_BUCKETS)
        self.time_per_output_token = _Histogram(_TOKEN_BUCKETS)
        self.e2e_latency = _Histogram(_REQUEST_BUCKETS)
        self.queue_time = _Histogram(_REQUEST_BUCKETS)

    def page(self, siblings: Sequence[bytes] = (), imbalance: Mapping[str, float] | None = None) -> bytes:
        """The exposition text; `siblings` are the own parts of other workers before the same engines, `imbalance` is by layer."""
        of_engines = generate_latest(_Families(self._of_engines(imbalance or {})))
        return of_engines + _summed_pages([self.own_part(), *siblings])

    def own_part(self) -> bytes:
        """What this front has counted itself."""
        return generate_latest(_Families(self._own()))

    def _own(self) -> Iterator[Metric]:
        counter = CounterMetricFamily
        yield self._family(counter, "prompt_tokens", "Prompt tokens of requests that got an answer.", self.prompt_tokens)
        yield self._family(counter, "generation_tokens", "Tokens generated.", self.generation_tokens)
        yield self._family(counter, "request_success", "Choices that ended.", self.successes, "finished_reason")
        yield self._family(counter, "aborts", "Sequences ended early.", self.aborts, "cause")
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Between two tokens of one choice.", self.inter_token_latency),
            ("time_per_output_token_seconds", "Mean time of a choice's tokens after its first.", self.time_per_output_token),
            ("e2e_request_latency_seconds", "Arrival to the end of a choice.", self.e2e_latency),
            ("request_queue_time_seconds", "Arrival to the first step.", self.queue_time),
        ):
            family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], histogram.buckets(), histogram.sum)
            yield family

    def _of_engines(self, imbalance: Mapping[str, float]) -> Iterator[Metric]:
        stats, counter, gauge = self._engines.stats(), CounterMetricFamily, GaugeMetricFamily
        for name, (text, member) in _GAUGES.items():
            values = [getattr(rank, member) for rank in stats]
            yield self._family(gauge, name, text, sum(values))
            yield self._family(gauge, f"rank_{name}", text, dict(enumerate(values)), "rank")
        name, text = "kv_cache_usage_perc", "Share of KV pages in use; 1 is all."
        usage = sum(rank.used_pages for rank in stats) / max(1, sum(self._page_counts))
        shares = [rank.used_pages / max(1, count) for rank, count in zip(stats, self._page_counts, strict=True)]
        yield self._family(gauge, name, text, usage)
        yield self._family(gauge, f"rank_{name}", text, dict(enumerate(shares)), "rank")
        for name, text in _RANK_COUNTERS.items():
            yield self._family(counter, f"rank_{name}", text, {n: getattr(rank, name) for n, rank in enumerate(stats)}, "rank")
        for name, text in _COUNTERS.items():
            yield self._family(counter, name, text, sum(getattr(rank, name) for rank in stats))
        replays, eager = collections.Counter[int](), collections.Counter[str]()
        for rank in stats:
            replays.update(rank.graph_replays)
            eager.update(rank.eager_decode_steps)
        yield self._family(counter, "graph_replay", "Graph replays by batch size.", replays, "bs")
        yield self._family(counter, "eager_decode_steps", "Decode steps without a graph.", eager, "reason")
        age = self._engines.token_age()
        yield self._family(gauge, "last_decode_age_seconds", "Since an engine last told of a token.", age)
        text = "Tokens of the rank with the most over the mean rank's, of the layer's experts, since the start."
        yield self._family(gauge, "ep_imbalance_ratio", text, imbalance, "layer")
        yield self._family(gauge, "startup_seconds", "Seconds of the start.", self._startup, "phase")

    def _family(
        self, kind: _Family, name: str, text: str, values: float | Mapping[str, float] | Mapping[int, float], label: str = ""
    ) -> Metric:
        """One value, or one for each value of `label`."""
        family = kind(f"{self._prefix}:{name}", text, labels=["model_name", label] if label else ["model_name"])
        for key, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            family.add_metric([self._model_name, str(key)] if label else [self._model_name], value)
        return family


class _Families(Collector):
    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families


class _Histogram:
    """Counts by bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many values were not above them."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(bounds, map(float, itertools.accumulate(self._counts)), strict=True))


class ChoiceClock:
    """When the tokens of one choice came. Times are `time.monotonic()` seconds."""

    __slots__ = ("_arrival", "_first", "_last", "_metrics", "_num_tokens")

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._first = self._last = 0.0
        self._num_tokens = 0

    def tokens(self, count: int) -> None:
        """`count` new tokens came now."""
        now = time.monotonic()
        self._metrics.generation_tokens += count
        if self._num_tokens:
            self._metrics.inter_token_latency.observe((now - self._last) / count)
        else:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last = now
        self._num_tokens += count

    def end(self, finish_reason: str) -> None:
        """The choice ended well."""
        metrics = self._metrics
        metrics.successes["length" if finish_reason == "length" else "stop"] += 1
        metrics.e2e_latency.observe(time.monotonic() - self._arrival)
        if self._num_tokens > 1:
            metrics.time_per_output_token.observe((self._last - self._first) / (self._num_tokens - 1))


def imbalance(loads: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, float]:
    """Layer to the largest rank's tokens over the mean rank's, from each rank's counts; layers without tokens are left out."""
    ratios: dict[str, float] = {}
    for layer in loads[0] if loads else ():
        totals = [sum(load[layer]) for load in loads]
        if any(totals):
            ratios[layer] = max(totals) * len(totals) / sum(totals)
    return ratios


def _summed_pages(pages: Sequence[bytes]) -> bytes:
    """One page whose samples are the sums."""
    split = [[line.rpartition(" ") for line in page.decode().splitlines()] for page in pages]
    totals: dict[str, float] = collections.defaultdict(float)
    for name, _, value in itertools.chain(*split):
        if not name.startswith("#"):
            totals[name] += float(value)
    return "".join(f"{name} {totals.get(name, value)}\n" for name, _, value in split[0]).encode()
