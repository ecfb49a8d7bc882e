-- Every service that spans came from.
SELECT DISTINCT ServiceName FROM otel.services WHERE ServiceName != '' ORDER BY ServiceName
