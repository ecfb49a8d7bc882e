-- What a service did: span names with their kinds; kind '' means any.
SELECT DISTINCT SpanName, SpanKind FROM otel.services
WHERE ServiceName = {service:String} AND ({kind:String} = '' OR SpanKind = {kind:String})
ORDER BY SpanName, SpanKind
