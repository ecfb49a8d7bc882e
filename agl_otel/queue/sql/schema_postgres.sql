-- The queue's tables in PostgreSQL (schema_sqlite.sql has the same). Times are Unix seconds; JSON is text exactly as it was given.
-- Text is sorted by code point, as SQLite does. A fillfactor of 50 leaves room on the pages of rows that change often: a changed row that
-- stays on its page needs no new index entries.

CREATE TABLE schema_migrations (
    version BIGINT PRIMARY KEY,           -- schema.VERSION
    name TEXT COLLATE "C" NOT NULL,
    applied_at DOUBLE PRECISION NOT NULL
);

CREATE TABLE rollouts (
    ordinal BIGINT PRIMARY KEY,           -- order of creation
    rollout_id TEXT COLLATE "C" NOT NULL UNIQUE,
    status TEXT COLLATE "C" NOT NULL,
    mode TEXT COLLATE "C",
    priority BIGINT NOT NULL DEFAULT 0,
    position BIGINT,                      -- place in the queue; null while not_before lies ahead
    not_before DOUBLE PRECISION,
    start_time DOUBLE PRECISION NOT NULL,
    end_time DOUBLE PRECISION,
    resources_id TEXT COLLATE "C",
    resources_version BIGINT,
    timeout_seconds DOUBLE PRECISION,
    unresponsive_seconds DOUBLE PRECISION,
    max_attempts BIGINT NOT NULL DEFAULT 1,
    retry_condition TEXT COLLATE "C" NOT NULL DEFAULT '[]',
    attempt_count BIGINT NOT NULL DEFAULT 0,
    latest_attempt_id TEXT COLLATE "C",
    labels TEXT COLLATE "C",
    reason TEXT COLLATE "C",              -- why it failed for good
    metadata TEXT COLLATE "C",
    run TEXT COLLATE "C" NOT NULL DEFAULT '',  -- what metadata names, else the set of resources
    step BIGINT                           -- what metadata names
);
-- claim: the next one is the first entry
CREATE INDEX rollouts_queue ON rollouts (priority DESC, position) WHERE status IN ('queuing', 'requeuing') AND position IS NOT NULL;
CREATE INDEX rollouts_delayed ON rollouts (not_before) WHERE status IN ('queuing', 'requeuing') AND position IS NULL;
-- watchdog: only rollouts that can be overdue
CREATE INDEX rollouts_watched ON rollouts (ordinal)
    WHERE status IN ('preparing', 'running') AND (timeout_seconds IS NOT NULL OR unresponsive_seconds IS NOT NULL);
CREATE INDEX rollouts_status ON rollouts (status);
-- failed ones in the order of their end
CREATE INDEX rollouts_dead ON rollouts (end_time) WHERE status = 'failed';

-- Apart from its row, so that a change of status never rewrites a large input.
CREATE TABLE inputs (
    ordinal BIGINT PRIMARY KEY,
    input TEXT COLLATE "C" NOT NULL
);

CREATE TABLE attempts (
    attempt_id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    rollout_id TEXT COLLATE "C" NOT NULL,
    sequence_id BIGINT NOT NULL,
    status TEXT COLLATE "C" NOT NULL,
    start_time DOUBLE PRECISION NOT NULL,
    end_time DOUBLE PRECISION,
    worker_id TEXT COLLATE "C",
    last_heartbeat_time DOUBLE PRECISION,
    token TEXT COLLATE "C" NOT NULL,      -- fencing token, known to the claimer only
    seals TEXT COLLATE "C",               -- {process marker: spans ended}
    error TEXT COLLATE "C",
    metadata TEXT COLLATE "C",
    ledger TEXT COLLATE "C",              -- types.AttemptLedger, JSON
    proxies TEXT COLLATE "C"              -- {process marker: address}, JSON
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX attempts_of_rollout ON attempts (rollout_id, sequence_id);

CREATE TABLE workers (
    worker_id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    status TEXT COLLATE "C" NOT NULL DEFAULT 'unknown',
    heartbeat_stats TEXT COLLATE "C",
    last_heartbeat_time DOUBLE PRECISION,
    last_dequeue_time DOUBLE PRECISION,
    last_busy_time DOUBLE PRECISION,
    last_idle_time DOUBLE PRECISION,
    current_rollout_id TEXT COLLATE "C",
    current_attempt_id TEXT COLLATE "C"
);

CREATE TABLE resources (
    ordinal BIGINT PRIMARY KEY,           -- breaks ties of update_time
    resources_id TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL,
    create_time DOUBLE PRECISION NOT NULL,
    update_time DOUBLE PRECISION NOT NULL,
    is_current BIGINT NOT NULL,           -- 1 for the newest version of its id
    resources TEXT COLLATE "C" NOT NULL,
    UNIQUE (resources_id, version)
);
CREATE INDEX resources_current ON resources (update_time, ordinal) WHERE is_current = 1;

-- Span numbers: one counter for each rollout id, known or not.
CREATE TABLE sequences (
    rollout_id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    last BIGINT NOT NULL
);

-- Counters of the queue's own: ordinals and positions.
CREATE TABLE counters (
    name TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    last BIGINT NOT NULL
);

-- Where ordinals and positions come from here: nobody waits for a sequence.
CREATE SEQUENCE places;

-- The user's own idempotency keys, kept as long as the rollouts they made.
CREATE TABLE enqueue_keys (
    idempotency_key TEXT COLLATE "C" NOT NULL,
    item BIGINT NOT NULL,
    rollout_id TEXT COLLATE "C" NOT NULL,
    fingerprint TEXT COLLATE "C" NOT NULL,  -- of what was asked for, so that a key used twice for different tasks is noticed
    PRIMARY KEY (idempotency_key, item)
);
CREATE INDEX enqueue_keys_rollout ON enqueue_keys (rollout_id);

-- Answers by request id, for retries after a lost answer. They hold ids, not bodies.
CREATE TABLE answers (
    request_id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    method TEXT COLLATE "C" NOT NULL,
    answer TEXT COLLATE "C" NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    replays BIGINT NOT NULL DEFAULT 0
);
CREATE INDEX answers_age ON answers (created_at);

CREATE TABLE leases (
    name TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    holder TEXT COLLATE "C" NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL
);

CREATE TABLE services (
    service TEXT COLLATE "C" NOT NULL,
    instance TEXT COLLATE "C" NOT NULL,
    addresses TEXT COLLATE "C" NOT NULL,
    announced_at DOUBLE PRECISION NOT NULL,
    gone BIGINT NOT NULL DEFAULT 0,
    seconds DOUBLE PRECISION,             -- how long the registration holds; null: until `gone`
    PRIMARY KEY (service, instance)
);

-- How many there are: 'rollouts/STATUS/MODE', 'claimable', 'attempts'. Changed in the transaction that changes what is counted, so that
-- they are right after a crash. In PostgreSQL several rows for a name, one for each connection that writes: commits do not wait for each other.
CREATE TABLE tallies (
    name TEXT COLLATE "C" NOT NULL,
    shard BIGINT NOT NULL,
    count BIGINT NOT NULL,
    PRIMARY KEY (name, shard)
) WITH (fillfactor = 50);

-- How many rollouts each run has: grouping 100,000 rollouts took 0.4 s. Changed as tallies are. Times and steps are those of all rollouts
-- that were ever counted here.
CREATE TABLE run_tallies (
    run TEXT COLLATE "C" NOT NULL,
    status TEXT COLLATE "C" NOT NULL,
    mode TEXT COLLATE "C" NOT NULL,       -- empty: none
    shard BIGINT NOT NULL,
    rollouts BIGINT NOT NULL,
    attempts BIGINT NOT NULL,
    first_start DOUBLE PRECISION NOT NULL,
    last_end DOUBLE PRECISION,
    last_step BIGINT,
    PRIMARY KEY (run, status, mode, shard)
) WITH (fillfactor = 50);
