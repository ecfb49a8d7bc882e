-- How the parts of otel_traces are written and merged. A batch (32 MiB at most) becomes a compact part: one file to sync instead of a
-- hundred. To merge a row once costs more CPU than to insert it, so parts wait until about a dozen of a size are there, instead of five:
-- half the merge CPU for each row that is stored; parts that grow old are merged all the same, when there is nothing else to do.
ALTER TABLE otel.otel_traces MODIFY SETTING min_bytes_for_wide_part = 67108864, merge_selector_base = 12;
