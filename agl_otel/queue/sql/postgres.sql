-- PostgreSQL's versions of queries, by the names that they replace: they lock the rows that they read, and name types where none can
-- be inferred. A claim passes over what another one holds; everybody else waits for it.
-- `ORDER BY r.ordinal + 0` sorts a handful: for the bare column the planner would walk the whole primary key.

-- name: keys_held
-- Wait for every other transaction that holds one of these keys, and hold them, in one order for all.
SELECT pg_advisory_xact_lock(k.number) FROM (
    SELECT hashtextextended(current_schema() || ' ' || value, 0) AS number FROM json_array_elements_text(:keys::json) ORDER BY 1
) k;

-- name: rollouts_held
-- Hold rollouts until the transaction ends, in one order for all, so that two that hold several do not wait for each other.
SELECT r.ordinal FROM rollouts r WHERE r.rollout_id IN (SELECT value FROM json_each(:rollout_ids)) ORDER BY r.ordinal + 0 FOR UPDATE;

-- name: rollout_for_update
-- One rollout, held until the transaction ends.
SELECT {rollout} FROM rollouts r WHERE r.rollout_id = :rollout_id FOR UPDATE;

-- name: rollouts_for_update
-- Rollouts by id, held until the transaction ends, in the order of rollouts_held.
SELECT {rollout} FROM rollouts r WHERE r.rollout_id IN (SELECT value FROM json_each(:rollout_ids)) ORDER BY r.ordinal + 0 FOR UPDATE;

-- name: attempts_held
-- Attempts by id with their rollouts, both held until the transaction ends.
SELECT {rollout}, {attempt} FROM attempts a JOIN rollouts r ON r.rollout_id = a.rollout_id
WHERE a.attempt_id IN (SELECT value FROM json_each(:attempt_ids)) ORDER BY r.ordinal + 0 FOR UPDATE OF r, a;

-- name: rollouts_due
-- Delayed rollouts whose time has come, but for those that another service is promoting.
SELECT r.ordinal FROM rollouts r WHERE r.status IN ('queuing', 'requeuing') AND r.position IS NULL AND r.not_before <= :now
ORDER BY r.not_before, r.ordinal FOR UPDATE SKIP LOCKED;

-- name: claimable_any
-- The next rollouts to be claimed, with input, but for those that another claim holds; inputs are looked up only for what is claimed.
SELECT {rollout}, i.input FROM (
    SELECT * FROM rollouts w WHERE w.status IN ('queuing', 'requeuing') AND w.position IS NOT NULL
    ORDER BY w.priority DESC, w.position LIMIT :limit FOR UPDATE SKIP LOCKED
) r JOIN inputs i ON i.ordinal = r.ordinal ORDER BY r.priority DESC, r.position;

-- name: claimable_matching
-- The next rollouts of these modes (JSON list, null: all) that carry all of these labels (JSON object), and are of no other run (null: all).
SELECT {rollout}, i.input FROM rollouts r JOIN inputs i ON i.ordinal = r.ordinal
WHERE r.status IN ('queuing', 'requeuing') AND r.position IS NOT NULL
  AND (:modes::text IS NULL OR r.mode = ANY(ARRAY(SELECT json_array_elements_text(:modes::json))))
  AND (:run::text IS NULL OR coalesce(r.labels::json ->> 'agl.run', :run::text) = :run::text)
  AND NOT EXISTS (SELECT 1 FROM json_each_text(:labels::json) want
      WHERE NOT EXISTS (SELECT 1 FROM json_each_text(coalesce(r.labels, '{}')::json) have WHERE have.key = want.key AND have.value = want.value))
ORDER BY r.priority DESC, r.position LIMIT :limit FOR UPDATE OF r SKIP LOCKED;

-- name: overdue_candidates
-- Active rollouts whose latest attempt may be overdue, but for those that are just being changed; lifecycle.overdue decides.
SELECT {rollout}, {attempt} FROM rollouts r JOIN attempts a ON a.attempt_id = r.latest_attempt_id
WHERE r.status IN ('preparing', 'running') AND (r.timeout_seconds IS NOT NULL OR r.unresponsive_seconds IS NOT NULL)
  AND (a.start_time + r.timeout_seconds < :now OR coalesce(a.last_heartbeat_time, a.start_time) + r.unresponsive_seconds < :now)
ORDER BY r.ordinal FOR UPDATE OF r, a SKIP LOCKED;

-- name: runs_parts
-- The counters of runs, of one where it is named; in brackets, because a bare max would be SQLite's idiom.
SELECT run, status, mode, sum(rollouts)::bigint, sum(attempts)::bigint, min(first_start), (max(last_end)), (max(last_step))
FROM run_tallies WHERE (:run::text IS NULL OR run = :run::text) GROUP BY run, status, mode;

-- name: run_tally_add
-- Change how many rollouts and attempts runs have, in rows of this connection's own; greatest leaves out nulls.
INSERT INTO run_tallies (run, status, mode, shard, rollouts, attempts, first_start, last_end, last_step)
SELECT x.run, x.status, x.mode, pg_backend_pid() & 255, x.rollouts, x.attempts, x.first_start, x.last_end, x.last_step
FROM json_populate_recordset(NULL::run_tallies, :rows::json) AS x ORDER BY x.run, x.status, x.mode
ON CONFLICT (run, status, mode, shard) DO UPDATE SET rollouts = run_tallies.rollouts + excluded.rollouts,
    attempts = run_tallies.attempts + excluded.attempts, first_start = least(run_tallies.first_start, excluded.first_start),
    last_end = greatest(run_tallies.last_end, excluded.last_end), last_step = greatest(run_tallies.last_step, excluded.last_step);

-- name: run_tallies_purge
-- Counters whose shards come to nothing together. What another connection added meanwhile is put into a shard of its own, so nothing is lost.
WITH gone AS (
    DELETE FROM run_tallies t USING (
        SELECT run, status, mode FROM run_tallies GROUP BY run, status, mode HAVING sum(rollouts) = 0 AND sum(attempts) = 0
    ) e WHERE t.run = e.run AND t.status = e.status AND t.mode = e.mode RETURNING t.*
)
INSERT INTO run_tallies (run, status, mode, shard, rollouts, attempts, first_start, last_end, last_step)
SELECT run, status, mode, 256, sum(rollouts), sum(attempts), min(first_start), (max(last_end)), (max(last_step)) FROM gone
GROUP BY run, status, mode HAVING sum(rollouts) <> 0 OR sum(attempts) <> 0
ON CONFLICT (run, status, mode, shard) DO UPDATE SET rollouts = run_tallies.rollouts + excluded.rollouts,
    attempts = run_tallies.attempts + excluded.attempts;

-- name: sequence_take
-- Raise a rollout's counter to at_least, then by count; answers the last number taken.
INSERT INTO sequences (rollout_id, last) VALUES (:rollout_id, greatest(:at_least::bigint, 0) + :count::bigint)
ON CONFLICT (rollout_id) DO UPDATE SET last = greatest(sequences.last, :at_least::bigint) + :count::bigint RETURNING last;

-- name: counter_take
-- A block of 2^24 numbers, whatever its name; answers the last of the `count` that are used of it. Nobody waits for a sequence.
SELECT (nextval('places') << 24) + :count::bigint - 1;

-- name: answers_recall
-- The answers that request ids got, held so that they are not taken back meanwhile.
SELECT request_id, method, answer FROM answers WHERE request_id IN (SELECT value FROM json_each(:request_ids)) ORDER BY request_id FOR UPDATE;

-- name: answer_remember
-- Keep the answers to request ids.
INSERT INTO answers (request_id, method, answer, created_at)
SELECT request_id, method, answer, now FROM json_to_recordset(:rows::json) AS x (request_id text, method text, answer text, now float8);

-- name: worker_busy
-- Workers begin, or go on with, an attempt each.
INSERT INTO workers (worker_id, status, last_busy_time, last_dequeue_time, current_rollout_id, current_attempt_id)
SELECT x.worker_id, 'busy', x.now, x.dequeued, x.rollout_id, x.attempt_id
FROM json_to_recordset(:rows::json) AS x (worker_id text, now float8, dequeued float8, rollout_id text, attempt_id text) ORDER BY x.worker_id
ON CONFLICT (worker_id) DO UPDATE SET status = 'busy', last_busy_time = excluded.last_busy_time,
    last_dequeue_time = coalesce(excluded.last_dequeue_time, workers.last_dequeue_time),
    current_rollout_id = excluded.current_rollout_id, current_attempt_id = excluded.current_attempt_id;

-- name: worker_free
-- Workers' attempts ended (idle) or are lost (unknown).
INSERT INTO workers (worker_id, status, last_idle_time)
SELECT x.worker_id, x.status, x.now FROM json_to_recordset(:rows::json) AS x (worker_id text, status text, now float8) ORDER BY x.worker_id
ON CONFLICT (worker_id) DO UPDATE SET status = excluded.status, last_idle_time = excluded.last_idle_time,
    current_rollout_id = NULL, current_attempt_id = NULL;

-- name: rollout_insert
-- New rollouts, given as a JSON list of rows: one statement, whatever their number.
INSERT INTO rollouts (ordinal, rollout_id, status, mode, priority, position, not_before, start_time, end_time, resources_id, resources_version,
    timeout_seconds, unresponsive_seconds, max_attempts, retry_condition, attempt_count, latest_attempt_id, labels, reason, metadata, run,
    step)
SELECT ordinal, rollout_id, status, mode, priority, position, not_before, start_time, end_time, resources_id, resources_version,
    timeout_seconds, unresponsive_seconds, max_attempts, retry_condition, attempt_count, latest_attempt_id, labels, reason, metadata, run,
    step
FROM json_populate_recordset(NULL::rollouts, :rows::json);

-- name: input_insert
-- Their inputs.
INSERT INTO inputs (ordinal, input) SELECT ordinal, input FROM json_populate_recordset(NULL::inputs, :rows::json);

-- name: rollout_attempted
-- Rollouts got a further attempt each.
UPDATE rollouts r SET status = 'preparing', attempt_count = x.attempt_count, latest_attempt_id = x.latest_attempt_id
FROM json_populate_recordset(NULL::rollouts, :rows::json) x WHERE r.ordinal = x.ordinal;

-- name: rollout_status
-- Other statuses, each of a rollout that is held.
UPDATE rollouts r SET status = x.status, position = x.position, end_time = x.end_time, reason = x.reason
FROM json_populate_recordset(NULL::rollouts, :rows::json) x WHERE r.ordinal = x.ordinal;

-- name: attempt_insert
-- New attempts.
INSERT INTO attempts (attempt_id, rollout_id, sequence_id, status, start_time, end_time, worker_id, last_heartbeat_time, token, seals, error, metadata)
SELECT attempt_id, rollout_id, sequence_id, status, start_time, end_time, worker_id, last_heartbeat_time, token, seals, error, metadata
FROM json_populate_recordset(NULL::attempts, :rows::json);

-- name: attempt_save
-- All that may change of attempts.
UPDATE attempts a SET status = x.status, end_time = x.end_time, worker_id = x.worker_id, last_heartbeat_time = x.last_heartbeat_time,
    seals = x.seals, error = x.error, metadata = x.metadata, ledger = x.ledger
FROM json_populate_recordset(NULL::attempts, :rows::json) x WHERE a.attempt_id = x.attempt_id;

-- name: tally_add
-- Change how many there are of something, in rows of this connection's own (one of 256 each, so that the sum stays cheap).
INSERT INTO tallies (name, shard, count)
SELECT x.name, pg_backend_pid() & 255, x.change FROM json_to_recordset(:rows::json) AS x (name text, change bigint) ORDER BY x.name
ON CONFLICT (name, shard) DO UPDATE SET count = tallies.count + excluded.count;

-- name: services_present
-- Services that are registered, the oldest first. The queue is up since `up_since`; nothing could renew before.
SELECT service, addresses FROM services
WHERE gone = 0 AND (seconds IS NULL OR announced_at + seconds > :now::float8 OR :up_since::float8 + seconds > :now::float8)
ORDER BY announced_at, service, instance;
