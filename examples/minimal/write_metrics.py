"""Metrics of a training run, written by the store, and of a program, by OpenTelemetry. Both go through the collector to ClickHouse.

agl-otel store                      # in another terminal
python write_metrics.py [--store http://localhost:4747]
"""

from __future__ import annotations

import argparse
import asyncio

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

import agl_otel as agl

LATEST = """
SELECT MetricName, argMax(Value, TimeUnix) AS Value FROM (
  SELECT MetricName, Value, TimeUnix FROM otel_metrics_gauge UNION ALL SELECT MetricName, Value, TimeUnix FROM otel_metrics_sum)
WHERE startsWith(MetricName, 'agl.training.') OR startsWith(MetricName, 'example.') GROUP BY MetricName ORDER BY MetricName
"""


async def main(address: str) -> None:
    store = await agl.LightningStoreClient(address).open()
    for step in range(3):
        await store.record_figures({"reward_mean": step / 2}, algorithm="example")

    exporter = OTLPMetricExporter(endpoint=f"http://{store.description.collector_grpc}", insecure=True)
    provider = MeterProvider([PeriodicExportingMetricReader(exporter)])
    counter = provider.get_meter("example").create_counter("example.answers")
    for _ in range(5):
        counter.add(1)
    provider.shutdown()  # sends the remaining metrics

    await store.reader.barrier()
    for row in await store.reader.query(LATEST):
        print(f"{row['MetricName']} {row['Value']:g}")
    await store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", default="http://localhost:4747")
    asyncio.run(main(parser.parse_args().store))
