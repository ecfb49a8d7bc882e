"""Metrics in Prometheus' text format, by prometheus_client. Imported on the first request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from agl_otel.telemetry.meters import Durations, Family

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
_TOTAL: Final = "_total"  # prometheus_client appends it to a counter's name


class _Page(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def text_of(families: Iterable[Family]) -> str:
    """Return the metrics as a page."""
    return _text([_metric(family) for family in families])


def merged(pages: Mapping[str, str], label: str) -> str:
    """Merge {service: its page} into one page: `label` holds the service, and each metric is described once."""
    found: dict[str, Metric] = {}
    for service, page in pages.items():
        for metric in text_string_to_metric_families(page):
            into = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                into.add_sample(sample.name, {label: service, **sample.labels}, sample.value)
    return _text([*found.values()])


def _text(metrics: Sequence[Metric]) -> str:
    return generate_latest(_Page(metrics)).decode()


def _metric(family: Family) -> Metric:
    name = family.name.replace(".", "_")
    metric = Metric(name.removesuffix(_TOTAL) if family.kind == "counter" else name, family.about, family.kind)
    for labels, value in family.samples:
        metric.add_sample(name, dict(labels), value)
    for labels, durations in family.durations:
        _add_buckets(metric, dict(labels), durations)
    return metric


def _add_buckets(metric: Metric, labels: dict[str, str], durations: Durations) -> None:
    reached = list(accumulate(durations.buckets))
    for bound, count in zip((*durations.bounds, float("inf")), reached, strict=True):
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": floatToGoString(bound)}, count)
    metric.add_sample(f"{metric.name}_sum", labels, durations.seconds)
    metric.add_sample(f"{metric.name}_count", labels, reached[-1])
