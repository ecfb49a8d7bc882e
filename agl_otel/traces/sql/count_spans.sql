-- How many spans of a rollout match, for a page behind the last one; the same parts as in query_spans.sql.
SELECT count() AS Total FROM ($spans) WHERE $where
