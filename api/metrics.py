"""What `/metrics` shows, in Prometheus' text form, from a registry of this service's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aotcache.service.index import Totals

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_METHODS = frozenset(("GET", "HEAD", "PUT", "POST", "DELETE"))


class Metrics:
    """Counters of one service. Threads may share it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "aotcache_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self._seconds = Histogram(
            "aotcache_request_seconds",
            "Seconds until the last byte of the answer.",
            ("method", "route"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._received = Counter("aotcache_bytes_in", "Bytes of request bodies.", registry=self.registry)
        self._sent = Counter("aotcache_bytes_out", "Bytes of response bodies.", registry=self.registry)
        self._hits = Counter("aotcache_hits", "Keys that were found.", registry=self.registry)
        self._misses = Counter("aotcache_misses", "Keys that were not.", registry=self.registry)
        self._artifacts = Gauge("aotcache_store_artifacts", "Entries.", registry=self.registry)
        self._blobs = Gauge("aotcache_store_archives", "Archives that entries name.", registry=self.registry)
        self._bytes = Gauge("aotcache_store_bytes", "Bytes of those archives.", registry=self.registry)
        self._database = _FromDatabase()
        self.registry.register(self._database)

    def request(
        self, method: str, route: str | None, status: int, seconds: float, received: int, sent: int
    ) -> None:
        """Count one request. What fits no route is one series, whatever its path."""
        method = method if method in _METHODS else "other"
        name = route or "other"
        self._requests.labels(method, name, str(status)).inc()
        self._seconds.labels(method, name).observe(seconds)
        self._received.inc(received)
        self._sent.inc(sent)

    def resolved(self, hits: int, misses: int) -> None:
        """Count the keys of one request."""
        self._hits.inc(hits)
        self._misses.inc(misses)

    def totals(self, totals: Totals) -> None:
        """What the database knows of the store and of all hits."""
        self._artifacts.set(totals.artifacts)
        self._blobs.set(totals.blobs)
        self._bytes.set(totals.bytes)
        self._database.saved = totals.saved_seconds
        self._database.deaths = totals.deaths

    def builds(self, counts: Mapping[tuple[str, str], int]) -> None:
        """How many builds are in each state and stage now."""
        self._database.builds = dict(counts)

    def text(self) -> bytes:
        """Everything, in Prometheus' text form."""
        return generate_latest(self.registry)


class _FromDatabase(Collector):
    """What lasts longer than this process, or may vanish: set as it was read last."""

    def __init__(self) -> None:
        self.builds: dict[tuple[str, str], int] = {}
        self.saved = 0.0
        self.deaths = 0

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        builds = GaugeMetricFamily("aotcache_builds", "Builds.", labels=("state", "stage"))
        for (state, stage), number in sorted(self.builds.items()):
            builds.add_metric((state, stage), number)
        yield builds
        yield CounterMetricFamily(
            "aotcache_build_seconds_saved",
            "Seconds that the builds of all hits took, which nobody had to wait for again; of the whole database.",
            value=self.saved,
        )
        yield CounterMetricFamily(
            "aotcache_worker_deaths",
            "Workers that died while they opened an archive or first ran it, as far as that was told.",
            value=self.deaths,
        )
