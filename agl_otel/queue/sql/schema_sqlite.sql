-- The queue's tables in SQLite (schema_postgres.sql has the same). Times are Unix seconds; JSON is text exactly as it was given.

CREATE TABLE schema_migrations (
    version INTEGER PRIMARY KEY,          -- schema.VERSION
    name TEXT NOT NULL,
    applied_at REAL NOT NULL
);

CREATE TABLE rollouts (
    ordinal INTEGER PRIMARY KEY,          -- order of creation
    rollout_id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    mode TEXT,
    priority INTEGER NOT NULL DEFAULT 0,
    position INTEGER,                     -- place in the queue; null while not_before lies ahead
    not_before REAL,
    start_time REAL NOT NULL,
    end_time REAL,
    resources_id TEXT,
    resources_version INTEGER,
    timeout_seconds REAL,
    unresponsive_seconds REAL,
    max_attempts INTEGER NOT NULL DEFAULT 1,
    retry_condition TEXT NOT NULL DEFAULT '[]',
    attempt_count INTEGER NOT NULL DEFAULT 0,
    latest_attempt_id TEXT,
    labels TEXT,
    reason TEXT,                          -- why it failed for good
    metadata TEXT,
    run TEXT NOT NULL DEFAULT '',         -- what metadata names, else the set of resources
    step INTEGER                          -- what metadata names
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
    ordinal INTEGER PRIMARY KEY,
    input TEXT NOT NULL
);

CREATE TABLE attempts (
    attempt_id TEXT NOT NULL PRIMARY KEY,
    rollout_id TEXT NOT NULL,
    sequence_id INTEGER NOT NULL,
    status TEXT NOT NULL,
    start_time REAL NOT NULL,
    end_time REAL,
    worker_id TEXT,
    last_heartbeat_time REAL,
    token TEXT NOT NULL,                  -- fencing token, known to the claimer only
    seals TEXT,                           -- {process marker: spans ended}
    error TEXT,
    metadata TEXT,
    ledger TEXT,                          -- types.AttemptLedger, JSON
    proxies TEXT                          -- {process marker: address}, JSON
) WITHOUT ROWID;
CREATE UNIQUE INDEX attempts_of_rollout ON attempts (rollout_id, sequence_id);

CREATE TABLE workers (
    worker_id TEXT NOT NULL PRIMARY KEY,
    status TEXT NOT NULL DEFAULT 'unknown',
    heartbeat_stats TEXT,
    last_heartbeat_time REAL,
    last_dequeue_time REAL,
    last_busy_time REAL,
    last_idle_time REAL,
    current_rollout_id TEXT,
    current_attempt_id TEXT
);

CREATE TABLE resources (
    ordinal INTEGER PRIMARY KEY,          -- breaks ties of update_time
    resources_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    create_time REAL NOT NULL,
    update_time REAL NOT NULL,
    is_current INTEGER NOT NULL,          -- 1 for the newest version of its id
    resources TEXT NOT NULL,
    UNIQUE (resources_id, version)
);
CREATE INDEX resources_current ON resources (update_time, ordinal) WHERE is_current = 1;

-- Span numbers: one counter for each rollout id, known or not.
CREATE TABLE sequences (
    rollout_id TEXT NOT NULL PRIMARY KEY,
    last INTEGER NOT NULL
) WITHOUT ROWID;

-- Counters of the queue's own: ordinals and positions.
CREATE TABLE counters (
    name TEXT NOT NULL PRIMARY KEY,
    last INTEGER NOT NULL
) WITHOUT ROWID;

-- The user's own idempotency keys, kept as long as the rollouts they made.
CREATE TABLE enqueue_keys (
    idempotency_key TEXT NOT NULL,
    item INTEGER NOT NULL,
    rollout_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL,            -- of what was asked for, so that a key used twice for different tasks is noticed
    PRIMARY KEY (idempotency_key, item)
) WITHOUT ROWID;
CREATE INDEX enqueue_keys_rollout ON enqueue_keys (rollout_id);

-- Answers by request id, for retries after a lost answer. They hold ids, not bodies.
CREATE TABLE answers (
    request_id TEXT NOT NULL PRIMARY KEY,
    method TEXT NOT NULL,
    answer TEXT NOT NULL,
    created_at REAL NOT NULL,
    replays INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX answers_age ON answers (created_at);

CREATE TABLE leases (
    name TEXT NOT NULL PRIMARY KEY,
    holder TEXT NOT NULL,
    expires_at REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE services (
    service TEXT NOT NULL,
    instance TEXT NOT NULL,
    addresses TEXT NOT NULL,
    announced_at REAL NOT NULL,
    gone INTEGER NOT NULL DEFAULT 0,
    seconds REAL,                         -- how long the registration holds; null: until `gone`
    PRIMARY KEY (service, instance)
) WITHOUT ROWID;

-- How many there are: 'rollouts/STATUS/MODE', 'claimable', 'attempts'. Changed in the transaction that changes what is counted, so that
-- they are right after a crash. In PostgreSQL several rows for a name, one for each connection that writes: commits do not wait for each other.
CREATE TABLE tallies (
    name TEXT NOT NULL,
    shard INTEGER NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (name, shard)
) WITHOUT ROWID;

-- How many rollouts each run has: grouping 100,000 rollouts took 0.4 s. Changed as tallies are. Times and steps are those of all rollouts
-- that were ever counted here.
CREATE TABLE run_tallies (
    run TEXT NOT NULL,
    status TEXT NOT NULL,
    mode TEXT NOT NULL,                   -- empty: none
    shard INTEGER NOT NULL,
    rollouts INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    first_start REAL NOT NULL,
    last_end REAL,
    last_step INTEGER,
    PRIMARY KEY (run, status, mode, shard)
) WITHOUT ROWID;
