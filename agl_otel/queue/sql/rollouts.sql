-- Rollouts. `-- name:` begins a query, the comment after it says what it does; {rollout} … are the columns of rows.py.
-- INDEXED BY is SQLite's: without it the planner takes rollouts_status and sorts. Another dialect leaves it out.

-- name: rollout_insert
-- One new rollout.
INSERT INTO rollouts (ordinal, rollout_id, status, mode, priority, position, not_before, start_time, end_time, resources_id, resources_version,
    timeout_seconds, unresponsive_seconds, max_attempts, retry_condition, attempt_count, latest_attempt_id, labels, reason, metadata, run,
    step)
VALUES (:ordinal, :rollout_id, :status, :mode, :priority, :position, :not_before, :start_time, :end_time, :resources_id, :resources_version,
    :timeout_seconds, :unresponsive_seconds, :max_attempts, :retry_condition, :attempt_count, :latest_attempt_id, :labels, :reason, :metadata, :run,
    :step);

-- name: input_insert
-- The input of a new rollout.
INSERT INTO inputs (ordinal, input) VALUES (:ordinal, :input);

-- name: input_update
-- Another input for a rollout.
UPDATE inputs SET input = :input WHERE ordinal = :ordinal;

-- name: rollouts_by_id
-- Rollouts by id, with input and latest attempt.
SELECT {rollout}, i.input, {attempt} FROM rollouts r JOIN inputs i ON i.ordinal = r.ordinal LEFT JOIN attempts a ON a.attempt_id = r.latest_attempt_id
WHERE r.rollout_id IN (SELECT value FROM json_each(:rollout_ids)) ORDER BY r.ordinal + 0;

-- name: rollout_for_update
-- One rollout, held until the transaction ends.
SELECT {rollout} FROM rollouts r WHERE r.rollout_id = :rollout_id;

-- name: rollouts_for_update
-- Rollouts by id, held until the transaction ends.
SELECT {rollout} FROM rollouts r WHERE r.rollout_id IN (SELECT value FROM json_each(:rollout_ids));

-- name: rollouts_due
-- Delayed rollouts whose time has come.
SELECT r.ordinal FROM rollouts r INDEXED BY rollouts_delayed WHERE r.status IN ('queuing', 'requeuing') AND r.position IS NULL AND r.not_before <= :now ORDER BY r.not_before, r.ordinal;

-- name: rollout_place
-- Put a rollout at this place of the queue.
UPDATE rollouts SET position = :position WHERE ordinal = :ordinal;

-- name: claimable_any
-- The next rollouts to be claimed, with input.
SELECT {rollout}, i.input FROM rollouts r INDEXED BY rollouts_queue JOIN inputs i ON i.ordinal = r.ordinal
WHERE r.status IN ('queuing', 'requeuing') AND r.position IS NOT NULL
ORDER BY r.priority DESC, r.position LIMIT :limit;

-- name: claimable_matching
-- The next rollouts of these modes (JSON list, null: all) that carry all of these labels (JSON object), and are of no other run (null: all).
SELECT {rollout}, i.input FROM rollouts r INDEXED BY rollouts_queue JOIN inputs i ON i.ordinal = r.ordinal
WHERE r.status IN ('queuing', 'requeuing') AND r.position IS NOT NULL
  AND (:modes IS NULL OR r.mode IN (SELECT value FROM json_each(:modes)))
  AND (:run IS NULL OR coalesce(json_extract(r.labels, '$."agl.run"'), :run) = :run)
  AND NOT EXISTS (SELECT 1 FROM json_each(:labels) want
      WHERE NOT EXISTS (SELECT 1 FROM json_each(coalesce(r.labels, '{}')) have WHERE have.key = want.key AND have.value = want.value))
ORDER BY r.priority DESC, r.position LIMIT :limit;

-- name: claimable_count
-- How many could be claimed now, counted up to a bound.
SELECT count(*) FROM (SELECT 1 FROM rollouts r INDEXED BY rollouts_queue WHERE r.status IN ('queuing', 'requeuing') AND r.position IS NOT NULL LIMIT :limit) AS found;

-- name: claimable_oldest
-- When the oldest of those that are first in line was created: one look into the index for each priority.
WITH RECURSIVE lines (priority, nth) AS (
    SELECT (SELECT r.priority FROM rollouts r INDEXED BY rollouts_queue
            WHERE r.status IN ('queuing', 'requeuing') AND r.position IS NOT NULL ORDER BY r.priority DESC LIMIT 1), 1
    UNION ALL
    SELECT (SELECT r.priority FROM rollouts r INDEXED BY rollouts_queue
            WHERE r.status IN ('queuing', 'requeuing') AND r.position IS NOT NULL AND r.priority < lines.priority ORDER BY r.priority DESC LIMIT 1), nth + 1
    FROM lines WHERE lines.priority IS NOT NULL AND nth < 100)
SELECT min((SELECT r.start_time FROM rollouts r INDEXED BY rollouts_queue WHERE r.status IN ('queuing', 'requeuing') AND r.position IS NOT NULL
    AND r.priority = lines.priority ORDER BY r.position LIMIT 1)) FROM lines;

-- name: rollout_attempted
-- A rollout got a further attempt.
UPDATE rollouts SET status = 'preparing', attempt_count = :attempt_count, latest_attempt_id = :latest_attempt_id WHERE ordinal = :ordinal;

-- name: rollout_released
-- A rollout loses the attempt that was not begun.
UPDATE rollouts SET status = :status, attempt_count = :attempt_count, latest_attempt_id = :latest_attempt_id WHERE ordinal = :ordinal;

-- name: rollout_status
-- Another status.
UPDATE rollouts SET status = :status, position = :position, end_time = :end_time, reason = :reason WHERE ordinal = :ordinal;

-- name: rollout_running
-- It runs.
UPDATE rollouts SET status = 'running' WHERE ordinal = :ordinal;

-- name: rollout_fields
-- What a user may change.
UPDATE rollouts SET mode = :mode, priority = :priority, position = :position, not_before = :not_before, resources_id = :resources_id,
    resources_version = :resources_version, timeout_seconds = :timeout_seconds, unresponsive_seconds = :unresponsive_seconds,
    max_attempts = :max_attempts, retry_condition = :retry_condition, metadata = :metadata, run = :run, step = :step
WHERE ordinal = :ordinal;

-- name: overdue_candidates
-- Active rollouts whose latest attempt may be overdue; lifecycle.overdue decides.
SELECT {rollout}, {attempt} FROM rollouts r INDEXED BY rollouts_watched JOIN attempts a ON a.attempt_id = r.latest_attempt_id
WHERE r.status IN ('preparing', 'running') AND (r.timeout_seconds IS NOT NULL OR r.unresponsive_seconds IS NOT NULL)
  AND (a.start_time + r.timeout_seconds < :now OR coalesce(a.last_heartbeat_time, a.start_time) + r.unresponsive_seconds < :now);

-- name: rollouts_page
-- A query of users; /*where*/ and /*page*/ are filled from the fragments below.
SELECT {rollout}, i.input, {attempt} FROM rollouts r JOIN inputs i ON i.ordinal = r.ordinal LEFT JOIN attempts a ON a.attempt_id = r.latest_attempt_id
/*where*/ /*page*/;

-- name: rollouts_page_sorted
-- The same in another order than that of their creation: inputs and attempts are looked up for what is on the page.
SELECT {rollout}, i.input, {attempt} FROM (SELECT r.ordinal AS chosen FROM rollouts r /*where*/ /*page*/) page JOIN rollouts r ON r.ordinal = page.chosen
JOIN inputs i ON i.ordinal = r.ordinal LEFT JOIN attempts a ON a.attempt_id = r.latest_attempt_id
/*order*/;

-- name: rollouts_page_dead
-- The same for failed ones by the time of their end: the index has them in this order, and the planner, left alone, would sort them all.
SELECT {rollout}, i.input, {attempt} FROM rollouts r INDEXED BY rollouts_dead JOIN inputs i ON i.ordinal = r.ordinal AND r.status = 'failed'
LEFT JOIN attempts a ON a.attempt_id = r.latest_attempt_id
/*where*/ /*page*/;

-- name: rollouts_total
-- How many match, before paging.
SELECT count(*) FROM rollouts r /*where*/;

-- name: where_rollout_status_in
-- Fragment.
r.status IN (SELECT value FROM json_each(:status_in))

-- name: where_rollout_queuing
-- Fragment: one status, written out so that the indexes of this status are found.
r.status = 'queuing'

-- name: where_rollout_preparing
-- Fragment: one status, written out so that the indexes of this status are found.
r.status = 'preparing'

-- name: where_rollout_running
-- Fragment: one status, written out so that the indexes of this status are found.
r.status = 'running'

-- name: where_rollout_failed
-- Fragment: one status, written out so that the indexes of this status are found.
r.status = 'failed'

-- name: where_rollout_succeeded
-- Fragment: one status, written out so that the indexes of this status are found.
r.status = 'succeeded'

-- name: where_rollout_cancelled
-- Fragment: one status, written out so that the indexes of this status are found.
r.status = 'cancelled'

-- name: where_rollout_requeuing
-- Fragment: one status, written out so that the indexes of this status are found.
r.status = 'requeuing'

-- name: where_rollout_ended_before
-- Fragment: finished, and before this time.
r.status IN ('failed', 'succeeded', 'cancelled') AND r.end_time < :ended_before

-- name: where_rollout_id_in
-- Fragment.
r.rollout_id IN (SELECT value FROM json_each(:id_in))

-- name: where_rollout_id_contains
-- Fragment.
instr(r.rollout_id, :id_contains) > 0

-- name: where_rollout_mode_in
-- Fragment.
r.mode IN (SELECT value FROM json_each(:mode_in))

-- name: where_rollout_run
-- Fragment.
r.run = :run

-- name: where_rollout_input_contains
-- Fragment: the text as it is, or as JSON writes it within a string; inputs are read, so only those of the latest rollouts.
(r.ordinal > coalesce((SELECT y.ordinal FROM rollouts y ORDER BY y.ordinal DESC LIMIT 1 OFFSET :searched), -1) AND EXISTS (SELECT 1 FROM inputs x
    WHERE x.ordinal = r.ordinal AND (instr(x.input, :input_contains) > 0 OR instr(x.input, :input_escaped) > 0)))

-- name: where_rollout_attempts_from
-- Fragment.
r.attempt_count >= :attempts_from

-- name: runs_parts
-- The counters of runs, of one where it is named.
SELECT run, status, mode, sum(rollouts), sum(attempts), min(first_start), max(last_end), max(last_step)
FROM run_tallies WHERE (:run IS NULL OR run = :run) GROUP BY run, status, mode;

-- name: run_members
-- The rollouts of one run, and which step made them.
SELECT r.rollout_id, coalesce(r.step, r.resources_version, -1), r.status, coalesce(r.mode, '') FROM rollouts r WHERE r.run = :run ORDER BY r.ordinal;

-- name: run_tally_add
-- Change how many rollouts and attempts a run has of one status and mode; SQLite's max of a null is null.
INSERT INTO run_tallies (run, status, mode, shard, rollouts, attempts, first_start, last_end, last_step)
VALUES (:run, :status, :mode, 0, :rollouts, :attempts, :first_start, :last_end, :last_step)
ON CONFLICT (run, status, mode, shard) DO UPDATE SET rollouts = rollouts + excluded.rollouts, attempts = attempts + excluded.attempts,
    first_start = min(first_start, excluded.first_start),
    last_end = max(coalesce(last_end, excluded.last_end), coalesce(excluded.last_end, last_end)),
    last_step = max(coalesce(last_step, excluded.last_step), coalesce(excluded.last_step, last_step));

-- name: run_tallies_purge
-- Counters that have come to nothing: of statuses that all have left, and of runs that were deleted.
DELETE FROM run_tallies WHERE rollouts = 0 AND attempts = 0;

-- name: delete_inputs
-- Deletion of rollouts by id, table by table.
DELETE FROM inputs WHERE ordinal IN (SELECT r.ordinal FROM rollouts r WHERE r.rollout_id IN (SELECT value FROM json_each(:rollout_ids)));

-- name: delete_attempts
-- See delete_inputs.
DELETE FROM attempts WHERE rollout_id IN (SELECT value FROM json_each(:rollout_ids));

-- name: delete_sequences
-- See delete_inputs.
DELETE FROM sequences WHERE rollout_id IN (SELECT value FROM json_each(:rollout_ids));

-- name: delete_enqueue_keys
-- See delete_inputs.
DELETE FROM enqueue_keys WHERE rollout_id IN (SELECT value FROM json_each(:rollout_ids));

-- name: delete_rollouts
-- See delete_inputs.
DELETE FROM rollouts WHERE rollout_id IN (SELECT value FROM json_each(:rollout_ids));

-- name: delete_found
-- What a deletion will remove.
SELECT {rollout} FROM rollouts r WHERE r.rollout_id IN (SELECT value FROM json_each(:rollout_ids));
