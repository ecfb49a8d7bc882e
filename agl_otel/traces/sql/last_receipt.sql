-- When the last span was received: known without reading a row, because partitions are of this column.
SELECT toUnixTimestamp64Nano(toDateTime64(max(ReceivedAt), 9)) AS LastNano FROM otel.otel_traces
