"""What the front measures and what engines report, as Prometheus text. Knows nothing of HTTP.

Names carry vLLM's suffixes, so that dashboards made for it need a change of prefix only.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from minserve.messages import StepStats
from minserve.server.engine_pool import EnginePool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_LABELS = ("model_name",)


class Metrics:
    """Counters and histograms of one front; `engines` is read when the page is asked for."""

    def __init__(self, prefix: str, model_name: str, engines: EnginePool, page_counts: list[int], startup: Mapping[str, float]):
        """`page_counts`: KV pages of each rank. `startup`: phase name to seconds."""
        self._registry = CollectorRegistry()
        self._engine_registry = CollectorRegistry()
        self._engine_collector = _EngineCollector(prefix, model_name, engines, page_counts, startup)
        self._engine_registry.register(self._engine_collector)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, _LABELS, registry=self._registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> _Histogram:
            made = _Histogram(f"{prefix}:{name}", text, model_name, buckets)
            self._registry.register(made)
            return made

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that got an answer.")
        self.generation_tokens = _Tally(f"{prefix}:generation_tokens", "Tokens generated.", model_name)
        self._registry.register(self.generation_tokens)
        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_BUCKETS)
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between two tokens of one choice.", _TOKEN_BUCKETS)
        self.time_per_output_token = histogram(
            "time_per_output_token_seconds", "Mean time of a choice's tokens after its first.", _TOKEN_BUCKETS
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "Arrival to the end of a choice.", _REQUEST_BUCKETS)
        self.queue_time = histogram("request_queue_time_seconds", "Arrival to the first step.", _REQUEST_BUCKETS)
        success = Counter(
            f"{prefix}:request_success", "Choices that ended.", (*_LABELS, "finished_reason"), registry=self._registry
        )
        self._success = {reason: success.labels(model_name, reason) for reason in ("stop", "length")}
        aborts = Counter(f"{prefix}:aborts", "Sequences ended early.", (*_LABELS, "cause"), registry=self._registry)
        causes = ("client_gone", "slow_reader", "api", "drain", "error")
        self._aborts = {cause: aborts.labels(model_name, cause) for cause in causes}

    def success(self, finish_reason: str) -> None:
        self._success[finish_reason].inc()

    def abort(self, cause: str, count: int) -> None:
        """`cause`: client_gone, slow_reader, api, drain or error."""
        self._aborts[cause].inc(count)

    def page(self, siblings: Sequence[bytes] = (), imbalance: Mapping[str, float] | None = None) -> bytes:
        """The exposition text; `siblings` are the own parts of other workers before the same engines, `imbalance` is by layer."""
        self._engine_collector.imbalance = imbalance or {}
        return generate_latest(self._engine_registry) + _summed_pages([self.own_part(), *siblings])

    def own_part(self) -> bytes:
        """What this front has counted itself."""
        return generate_latest(self._registry)


class _Tally(Collector):
    """A counter without the library's locks, for what happens with every token."""

    def __init__(self, name: str, text: str, model_name: str) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self.value = 0

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=_LABELS)
        family.add_metric([self._model_name], self.value)
        yield family


class _Histogram(Collector):
    """Counts by bucket. The library's own walks over the buckets and takes locks, which is too dear for every token."""

    def __init__(self, name: str, text: str, model_name: str, buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        pairs = list(zip(bounds, map(float, itertools.accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=_LABELS)
        family.add_metric([self._model_name], pairs, self._sum)
        yield family


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
        self._metrics.generation_tokens.value += count
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
        metrics.success(finish_reason)
        metrics.e2e_latency.observe(time.monotonic() - self._arrival)
        if self._num_tokens > 1:
            metrics.time_per_output_token.observe((self._last - self._first) / (self._num_tokens - 1))


class _EngineCollector(Collector):
    """Turns the engines' own counters into families, summed over ranks."""

    def __init__(self, prefix: str, model_name: str, engines: EnginePool, page_counts: list[int], startup: Mapping[str, float]):
        self._prefix = prefix
        self._model_name = model_name
        self._engines = engines
        self._page_counts = page_counts
        self._num_pages = sum(page_counts)
        self._startup = startup
        self.imbalance: Mapping[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        stats = self._engines.stats()
        used_pages = sum(rank.used_pages for rank in stats)
        usage = used_pages / self._num_pages if self._num_pages else 0.0
        yield self._gauge("num_requests_running", "Requests in the batch.", sum(rank.num_running for rank in stats))
        yield self._gauge("num_requests_waiting", "Requests in the queue.", sum(rank.num_waiting for rank in stats))
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages in use; 1 is all.", usage)
        yield self._gauge("last_decode_age_seconds", "Since an engine last told of a token.", self._engines.token_age())
        totals = {
            "prefix_cache_queries": ("Prompt tokens looked up.", sum(rank.prefix_cache_queries for rank in stats)),
            "prefix_cache_hits": ("Prompt tokens found.", sum(rank.prefix_cache_hits for rank in stats)),
            "num_preemptions": ("Requests pushed out for lack of pages.", sum(rank.num_preemptions for rank in stats)),
            "nan_rows": ("Rows of logits that were not finite.", sum(rank.nan_rows for rank in stats)),
            "mixed_steps": ("Steps that read prompts, with or without decode rows.", sum(rank.mixed_steps for rank in stats)),
        }
        for name, (text, value) in totals.items():
            yield self._labelled(CounterMetricFamily, name, text, None, {"": float(value)})
        replays = _summed([rank.graph_replays for rank in stats])
        eager = _summed([rank.eager_decode_steps for rank in stats])
        yield self._labelled(CounterMetricFamily, "graph_replay", "Graph replays by batch size.", "bs", replays)
        yield self._labelled(CounterMetricFamily, "eager_decode_steps", "Decode steps without a graph.", "reason", eager)
        yield from self._of_ranks(stats)
        text = "Tokens of the rank with the most over the mean rank's, of the layer's experts, since the start."
        yield self._labelled(GaugeMetricFamily, "ep_imbalance_ratio", text, "layer", self.imbalance)
        yield self._labelled(GaugeMetricFamily, "startup_seconds", "Seconds of the start.", "phase", self._startup)

    def _of_ranks(self, stats: list[StepStats]) -> Iterator[Metric]:
        """What tells one rank from another; the sums keep the names that dashboards know."""
        shares = [rank.used_pages / max(1, count) for rank, count in zip(stats, self._page_counts, strict=True)]
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        yield self._by_rank(gauge, "num_requests_running", "Requests in the batch.", [rank.num_running for rank in stats])
        yield self._by_rank(gauge, "num_requests_waiting", "Requests in the queue.", [rank.num_waiting for rank in stats])
        yield self._by_rank(gauge, "kv_cache_usage_perc", "Share of KV pages in use; 1 is all.", shares)
        yield self._by_rank(counter, "steps", "Steps with requests of this rank.", [rank.steps for rank in stats])
        yield self._by_rank(counter, "dummy_steps", "Steps for other ranks alone.", [rank.dummy_steps for rank in stats])

    def _by_rank(
        self, family: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, text: str, values: Sequence[float]
    ) -> Metric:
        by_rank = {str(rank): float(value) for rank, value in enumerate(values)}
        return self._labelled(family, f"rank_{name}", text, "rank", by_rank)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(GaugeMetricFamily, name, text, None, {"": float(value)})

    def _labelled(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        label: str | None,
        values: Mapping[str, float],
    ) -> Metric:
        metric = family(f"{self._prefix}:{name}", text, labels=[*_LABELS, *([label] if label else [])])
        for key, value in values.items():
            metric.add_metric([self._model_name, *([key] if label else [])], value)
        return metric


def imbalance(loads: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, float]:
    """Layer to the largest rank's tokens over the mean rank's, from each rank's counts; layers without tokens are left out."""
    ratios: dict[str, float] = {}
    for layer in loads[0] if loads else ():
        totals = [sum(load[layer]) for load in loads]
        if any(totals):
            ratios[layer] = max(totals) * len(totals) / sum(totals)
    return ratios


def _summed_pages(pages: Sequence[bytes]) -> bytes:
    """One page whose samples are the sums; times of creation are the first page's."""
    if len(pages) == 1:
        return pages[0]
    totals: dict[str, float] = {}
    for page in pages:
        for line in page.decode().splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#") and "_created" not in name.partition("{")[0]:
                totals[name] = totals.get(name, 0.0) + float(value)
    lines = []
    for line in pages[0].decode().splitlines():
        name = line.rpartition(" ")[0]
        lines.append(f"{name} {totals[name]!r}" if name in totals and not line.startswith("#") else line)
    return "\n".join([*lines, ""]).encode()


def _summed(counts: list[dict[str, int]] | list[dict[int, int]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for mapping in counts:
        for key, value in mapping.items():
            total[str(key)] = total.get(str(key), 0.0) + value
    return total
