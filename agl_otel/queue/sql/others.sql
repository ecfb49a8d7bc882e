-- Resources, workers, answers, leases, services, counters.

-- name: counter_take
-- Raise a counter of the queue's own by count; answers the last number taken.
INSERT INTO counters (name, last) VALUES (:name, :count) ON CONFLICT (name) DO UPDATE SET last = counters.last + :count RETURNING last;

-- name: resources_insert
-- One new version; is_current is 1, and 2 where it is never the latest of all.
INSERT INTO resources (ordinal, resources_id, version, create_time, update_time, is_current, resources)
VALUES (:ordinal, :resources_id, :version, :create_time, :update_time, :is_current, :resources);

-- name: resources_supersede
-- The current version of this id is current no more.
UPDATE resources SET is_current = 0 WHERE resources_id = :resources_id AND is_current <> 0;

-- name: resources_current
-- The current version of an id.
SELECT {resources} FROM resources s WHERE s.resources_id = :resources_id AND s.is_current <> 0;

-- name: resources_version
-- One version of an id.
SELECT {resources} FROM resources s WHERE s.resources_id = :resources_id AND s.version = :version;

-- name: resources_latest
-- The one that was written last.
SELECT {resources} FROM resources s WHERE s.is_current = 1 ORDER BY s.update_time DESC, s.ordinal DESC LIMIT 1;

-- name: resources_page
-- A query of users; /*where*/ and /*page*/ are filled from the fragments below.
SELECT {resources} FROM resources s /*where*/ /*page*/;

-- name: resources_total
-- How many match, before paging.
SELECT count(*) FROM resources s /*where*/;

-- name: resources_count
-- How many sets there are.
SELECT count(*) FROM resources WHERE is_current <> 0;

-- name: where_resources_id_in
-- Fragment.
s.resources_id IN (SELECT value FROM json_each(:id_in))

-- name: where_resources_id_contains
-- Fragment.
instr(s.resources_id, :id_contains) > 0

-- name: where_resources_current
-- Fragment.
s.is_current <> 0

-- name: worker_busy
-- A worker begins, or goes on with, an attempt.
INSERT INTO workers (worker_id, status, last_busy_time, last_dequeue_time, current_rollout_id, current_attempt_id)
VALUES (:worker_id, 'busy', :now, :dequeued, :rollout_id, :attempt_id)
ON CONFLICT (worker_id) DO UPDATE SET status = 'busy', last_busy_time = :now, last_dequeue_time = coalesce(:dequeued, workers.last_dequeue_time),
    current_rollout_id = :rollout_id, current_attempt_id = :attempt_id;

-- name: worker_free
-- A worker's attempt ended (idle) or is lost (unknown).
INSERT INTO workers (worker_id, status, last_idle_time) VALUES (:worker_id, :status, :now)
ON CONFLICT (worker_id) DO UPDATE SET status = :status, last_idle_time = :now, current_rollout_id = NULL, current_attempt_id = NULL;

-- name: worker_found_nothing
-- A worker asked and there was nothing to claim.
INSERT INTO workers (worker_id, status, last_idle_time, last_dequeue_time) VALUES (:worker_id, 'idle', :now, :now)
ON CONFLICT (worker_id) DO UPDATE SET last_dequeue_time = :now, last_idle_time = CASE WHEN workers.status = 'idle' THEN workers.last_idle_time ELSE :now END,
    status = 'idle', current_rollout_id = NULL, current_attempt_id = NULL;

-- name: worker_heartbeat
-- A worker says that it lives; never its status.
INSERT INTO workers (worker_id, heartbeat_stats, last_heartbeat_time) VALUES (:worker_id, :stats, :now)
ON CONFLICT (worker_id) DO UPDATE SET last_heartbeat_time = :now, heartbeat_stats = coalesce(:stats, workers.heartbeat_stats);

-- name: workers_page
-- A query of users; /*where*/ and /*page*/ are filled from the fragments below. A worker with several places is busy while one of its attempts is open.
SELECT {worker} FROM (SELECT w.worker_id, CASE WHEN b.worker_id IS NULL THEN w.status ELSE 'busy' END AS status, w.heartbeat_stats, w.last_heartbeat_time,
    w.last_dequeue_time, w.last_busy_time, w.last_idle_time, coalesce(w.current_rollout_id, b.rollout_id) AS current_rollout_id,
    coalesce(w.current_attempt_id, b.attempt_id) AS current_attempt_id
    FROM workers w LEFT JOIN attempts b ON b.worker_id = w.worker_id AND b.attempt_id IN (SELECT (max(a.attempt_id))
        FROM rollouts r JOIN attempts a ON a.attempt_id = r.latest_attempt_id
        WHERE r.status IN ('preparing', 'running') AND a.status IN ('preparing', 'running') GROUP BY a.worker_id)) w /*where*/ /*page*/;

-- name: workers_total
-- How many match, before paging.
SELECT count(*) FROM (SELECT w.worker_id, CASE WHEN b.worker_id IS NULL THEN w.status ELSE 'busy' END AS status, w.heartbeat_stats, w.last_heartbeat_time,
    w.last_dequeue_time, w.last_busy_time, w.last_idle_time, coalesce(w.current_rollout_id, b.rollout_id) AS current_rollout_id,
    coalesce(w.current_attempt_id, b.attempt_id) AS current_attempt_id
    FROM workers w LEFT JOIN attempts b ON b.worker_id = w.worker_id AND b.attempt_id IN (SELECT (max(a.attempt_id))
        FROM rollouts r JOIN attempts a ON a.attempt_id = r.latest_attempt_id
        WHERE r.status IN ('preparing', 'running') AND a.status IN ('preparing', 'running') GROUP BY a.worker_id)) w /*where*/;

-- name: where_worker_status_in
-- Fragment.
w.status IN (SELECT value FROM json_each(:status_in))

-- name: where_worker_id_in
-- Fragment.
w.worker_id IN (SELECT value FROM json_each(:id_in))

-- name: where_worker_id_contains
-- Fragment.
instr(w.worker_id, :id_contains) > 0

-- name: workers_count
-- How many there are.
SELECT count(*) FROM workers;

-- name: answers_recall
-- The answers that request ids got.
SELECT request_id, method, answer FROM answers WHERE request_id IN (SELECT value FROM json_each(:request_ids));

-- name: answer_replayed
-- A retry got the answer.
UPDATE answers SET replays = replays + 1 WHERE request_id = :request_id;

-- name: answer_remember
-- Keep the answer to a request id.
INSERT INTO answers (request_id, method, answer, created_at) VALUES (:request_id, :method, :answer, :now);

-- name: answer_take_unreplayed
-- Forget an answer that no retry has got.
DELETE FROM answers WHERE request_id = :request_id AND method = :method AND replays <= :replays RETURNING answer;

-- name: answers_purge
-- Forget what is older.
DELETE FROM answers WHERE created_at < :before;

-- name: key_items
-- What an idempotency key made.
SELECT item, rollout_id, fingerprint FROM enqueue_keys WHERE idempotency_key = :idempotency_key ORDER BY item;

-- name: key_insert
-- One item of an idempotency key.
INSERT INTO enqueue_keys (idempotency_key, item, rollout_id, fingerprint) VALUES (:idempotency_key, :item, :rollout_id, :fingerprint);

-- name: lease_of
-- Who holds a lease.
SELECT holder, expires_at FROM leases WHERE name = :name;

-- name: lease_set
-- Give a lease, unless another holds it.
INSERT INTO leases (name, holder, expires_at) VALUES (:name, :holder, :expires_at)
ON CONFLICT (name) DO UPDATE SET holder = :holder, expires_at = :expires_at WHERE leases.holder = :holder OR leases.expires_at <= :now;

-- name: lease_drop
-- Take a lease back.
DELETE FROM leases WHERE name = :name AND holder = :holder;

-- name: service_announce
-- A service says where it is and for how long, or that it has gone.
INSERT INTO services (service, instance, addresses, announced_at, gone, seconds) VALUES (:service, :instance, :addresses, :now, :gone, :seconds)
ON CONFLICT (service, instance) DO UPDATE SET addresses = :addresses, announced_at = :now, gone = :gone, seconds = :seconds;

-- name: services_present
-- Services that are registered, the oldest first. The queue is up since `up_since`; nothing could renew before.
SELECT service, addresses FROM services
WHERE gone = 0 AND (seconds IS NULL OR announced_at + seconds > :now OR :up_since + seconds > :now) ORDER BY announced_at, service, instance;

-- name: services_purge
-- Forget services that have been gone, or silent, since before `before`.
DELETE FROM services WHERE announced_at < :before AND (gone = 1 OR announced_at + seconds < :before);

-- name: tally_add
-- Change how many there are of something.
INSERT INTO tallies (name, shard, count) VALUES (:name, 0, :change) ON CONFLICT (name, shard) DO UPDATE SET count = tallies.count + :change;

-- name: tallies_all
-- How many there are of everything.
SELECT name, sum(count) FROM tallies GROUP BY name;
