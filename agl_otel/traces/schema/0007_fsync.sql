-- What the views write goes to the disk with the rows it comes from: a segment of the log is deleted after the insert, and recovery refills only
-- what the log still holds. Rows that retention has removed cannot be summed up again at all.
ALTER TABLE otel.otel_traces_trace_id_ts MODIFY SETTING fsync_after_insert = 1, fsync_part_directory = 1;

ALTER TABLE otel.rollout_summary_states MODIFY SETTING fsync_after_insert = 1, fsync_part_directory = 1;

ALTER TABLE otel.services MODIFY SETTING fsync_after_insert = 1, fsync_part_directory = 1;
