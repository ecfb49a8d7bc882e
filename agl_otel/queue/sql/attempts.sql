-- Attempts and the span numbers of their rollouts.

-- name: attempt_insert
-- One new attempt.
INSERT INTO attempts (attempt_id, rollout_id, sequence_id, status, start_time, end_time, worker_id, last_heartbeat_time, token, seals, error, metadata)
VALUES (:attempt_id, :rollout_id, :sequence_id, :status, :start_time, :end_time, :worker_id, :last_heartbeat_time, :token, :seals, :error, :metadata);

-- name: attempt_save
-- All that may change of an attempt.
UPDATE attempts SET status = :status, end_time = :end_time, worker_id = :worker_id, last_heartbeat_time = :last_heartbeat_time,
    seals = :seals, error = :error, metadata = :metadata, ledger = :ledger WHERE attempt_id = :attempt_id;

-- name: attempt_seen
-- What an observed span or heartbeat changes.
UPDATE attempts SET status = :status, last_heartbeat_time = :last_heartbeat_time WHERE attempt_id = :attempt_id;

-- name: attempts_alive
-- Their worker sent a heartbeat; they are held.
UPDATE attempts SET last_heartbeat_time = :now WHERE attempt_id IN (SELECT value FROM json_each(:attempt_ids));

-- name: attempt_witnessed
-- A proxy forwards calls of it.
UPDATE attempts SET proxies = :proxies WHERE attempt_id = :attempt_id;

-- name: attempts_of_held
-- Attempts by id whose rollouts are held: nobody else changes them.
SELECT {attempt} FROM attempts a WHERE a.attempt_id IN (SELECT value FROM json_each(:attempt_ids));

-- name: attempts_by_id
-- Attempts by id with their rollouts.
SELECT {rollout}, {attempt} FROM attempts a JOIN rollouts r ON r.rollout_id = a.rollout_id WHERE a.attempt_id IN (SELECT value FROM json_each(:attempt_ids));

-- name: attempts_held
-- The same, held until the transaction ends.
SELECT {rollout}, {attempt} FROM attempts a JOIN rollouts r ON r.rollout_id = a.rollout_id WHERE a.attempt_id IN (SELECT value FROM json_each(:attempt_ids));

-- name: attempt_before
-- The id of the attempt with this number.
SELECT a.attempt_id FROM attempts a WHERE a.rollout_id = :rollout_id AND a.sequence_id = :sequence_id;

-- name: attempt_delete
-- Take back an attempt that was not begun.
DELETE FROM attempts WHERE attempt_id = :attempt_id;

-- name: attempts_page
-- A query of users; /*where*/ and /*page*/ are filled from the fragments below.
SELECT {attempt} FROM attempts a /*where*/ /*page*/;

-- name: attempts_total
-- How many match, before paging.
SELECT count(*) FROM attempts a /*where*/;

-- name: where_attempt_rollout_in
-- Fragment.
a.rollout_id IN (SELECT value FROM json_each(:rollout_ids))

-- name: where_attempt_latest
-- Fragment.
a.attempt_id IN (SELECT r.latest_attempt_id FROM rollouts r WHERE r.rollout_id IN (SELECT value FROM json_each(:rollout_ids)))

-- name: sequence_take
-- Raise a rollout's counter to at_least, then by count; answers the last number taken.
INSERT INTO sequences (rollout_id, last) VALUES (:rollout_id, max(:at_least, 0) + :count)
ON CONFLICT (rollout_id) DO UPDATE SET last = max(sequences.last, :at_least) + :count RETURNING last;
