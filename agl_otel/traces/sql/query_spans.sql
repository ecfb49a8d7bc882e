-- One page of the spans of a rollout (or of one attempt), filtered and sorted. `$spans` is spans.sql; `$where` and `$order` come from
-- the tables in span_query.py, so no user's text is ever part of the query.
SELECT *, count() OVER () AS Total FROM ($spans) WHERE $where ORDER BY $order LIMIT {limit:UInt64} OFFSET {offset:UInt64}
SETTINGS max_threads = 1
