BEGIN TRANSACTION;
CREATE TABLE answers (
    request_id TEXT NOT NULL PRIMARY KEY,
    method TEXT NOT NULL,
    answer TEXT NOT NULL,
    created_at REAL NOT NULL,
    replays INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
INSERT INTO "answers" VALUES('01a206a7daf027f7c11b9cd7861d','PutResources','["rs-1", 1]',1795000000.0,0);
INSERT INTO "answers" VALUES('01a206a7db3a0eace3b3f19454cd','Enqueue','["ro-0", "ro-1", "ro-2", "ro-3", "ro-4", "ro-5"]',1795000000.0,0);
INSERT INTO "answers" VALUES('01a206a7db658934aa86afab628c','Claim','["at-01m83afpv7vrznb36dw6nnamss", "at-01m83afpv7q6pgy0w0qg6vwapp", "at-01m83afpv7mmr61vrcgq0w6773"]',1795000000.0,0);
INSERT INTO "answers" VALUES('01a206a7db6a5df7d2c52b223167','UpdateAttempts','["at-01m83afpv7vrznb36dw6nnamss"]',1795000000.0,0);
INSERT INTO "answers" VALUES('01a206a7db6d663b58b4c98635fc','UpdateAttempts','["at-01m83afpv7q6pgy0w0qg6vwapp"]',1795000000.0,0);
INSERT INTO "answers" VALUES('01a206a7db70e461d430e9905455','TakeSequence','[1]',1795000000.0,0);
CREATE TABLE attempts (
    attempt_id TEXT NOT NULL PRIMARY KEY,
    rollout_id TEXT NOT NULL,
    sequence_id INTEGER NOT NULL,
    status TEXT NOT NULL,
    start_time REAL NOT NULL,
    end_time REAL,
    worker_id TEXT,
    last_heartbeat_time REAL,
    token TEXT NOT NULL,                  
    seals TEXT,                           
    error TEXT,
    metadata TEXT
) WITHOUT ROWID;
INSERT INTO "attempts" VALUES('at-01m83afpv7mmr61vrcgq0w6773','ro-2',1,'preparing',1795000000.0,NULL,'w-1',NULL,'42a171f1ba5839f29c9b4b50',NULL,NULL,NULL);
INSERT INTO "attempts" VALUES('at-01m83afpv7q6pgy0w0qg6vwapp','ro-1',1,'failed',1795000000.0,1795000000.0,'w-1',NULL,'befcb5a34ea804b00c1734c5','{"p-1": 3}',NULL,NULL);
INSERT INTO "attempts" VALUES('at-01m83afpv7vrznb36dw6nnamss','ro-0',1,'succeeded',1795000000.0,1795000000.0,'w-1',NULL,'bc02e8ffca5d95d0ea5285c5','{"p-1": 3}',NULL,NULL);
CREATE TABLE counters (
    name TEXT NOT NULL PRIMARY KEY,
    last INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "counters" VALUES('place',7);
CREATE TABLE enqueue_keys (
    idempotency_key TEXT NOT NULL,
    item INTEGER NOT NULL,
    rollout_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL,            
    PRIMARY KEY (idempotency_key, item)
) WITHOUT ROWID;
CREATE TABLE inputs (
    ordinal INTEGER PRIMARY KEY,
    input TEXT NOT NULL
);
INSERT INTO "inputs" VALUES(2,'{"q":0}');
INSERT INTO "inputs" VALUES(3,'{"q":1}');
INSERT INTO "inputs" VALUES(4,'{"q":2}');
INSERT INTO "inputs" VALUES(5,'{"q":3}');
INSERT INTO "inputs" VALUES(6,'{"q":4}');
INSERT INTO "inputs" VALUES(7,'{"q":5}');
CREATE TABLE leases (
    name TEXT NOT NULL PRIMARY KEY,
    holder TEXT NOT NULL,
    expires_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE resources (
    ordinal INTEGER PRIMARY KEY,          
    resources_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    create_time REAL NOT NULL,
    update_time REAL NOT NULL,
    is_current INTEGER NOT NULL,          
    resources TEXT NOT NULL,
    UNIQUE (resources_id, version)
);
INSERT INTO "resources" VALUES(1,'rs-1',1,1795000000.0,1795000000.0,1,'{"p":{"resource_type":"prompt_template","template":"{q}","engine":"f-string"}}');
CREATE TABLE rollouts (
    ordinal INTEGER PRIMARY KEY,          
    rollout_id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    mode TEXT,
    priority INTEGER NOT NULL DEFAULT 0,
    position INTEGER,                     
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
    reason TEXT,                          
    metadata TEXT
);
INSERT INTO "rollouts" VALUES(2,'ro-0','succeeded','val',0,2,NULL,1795000000.0,1795000000.0,'rs-1',1,NULL,NULL,1,'[]',1,'at-01m83afpv7vrznb36dw6nnamss',NULL,NULL,'{"run":"first","step":0,"note":"\u00e9 \"x\""}');
INSERT INTO "rollouts" VALUES(3,'ro-1','failed','train',0,3,NULL,1795000000.0,1795000000.0,'rs-1',1,NULL,NULL,1,'[]',1,'at-01m83afpv7q6pgy0w0qg6vwapp',NULL,NULL,'{"run":"first","step":1,"note":"\u00e9 \"x\""}');
INSERT INTO "rollouts" VALUES(4,'ro-2','preparing','val',0,4,NULL,1795000000.0,NULL,'rs-1',1,NULL,NULL,1,'[]',1,'at-01m83afpv7mmr61vrcgq0w6773',NULL,NULL,'{"run":"first","step":2,"note":"\u00e9 \"x\""}');
INSERT INTO "rollouts" VALUES(5,'ro-3','queuing','train',0,5,NULL,1795000000.0,NULL,'rs-1',1,NULL,NULL,1,'[]',0,NULL,NULL,NULL,'{"run":"first","step":3,"note":"\u00e9 \"x\""}');
INSERT INTO "rollouts" VALUES(6,'ro-4','queuing','val',0,6,NULL,1795000000.0,NULL,'rs-1',1,NULL,NULL,1,'[]',0,NULL,NULL,NULL,'{"run":"first","step":4,"note":"\u00e9 \"x\""}');
INSERT INTO "rollouts" VALUES(7,'ro-5','queuing','train',0,7,NULL,1795000000.0,NULL,'rs-1',1,NULL,NULL,1,'[]',0,NULL,NULL,NULL,'{"run":"first","step":5,"note":"\u00e9 \"x\""}');
CREATE TABLE schema_migrations (version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL);
INSERT INTO "schema_migrations" VALUES(1,'0001_queue.sql',1.79540799341526317598e+09);
CREATE TABLE sequences (
    rollout_id TEXT NOT NULL PRIMARY KEY,
    last INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO "sequences" VALUES('ro-0',3);
CREATE TABLE services (
    service TEXT NOT NULL,
    instance TEXT NOT NULL,
    addresses TEXT NOT NULL,
    announced_at REAL NOT NULL,
    gone INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (service, instance)
) WITHOUT ROWID;
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
INSERT INTO "workers" VALUES('w-1','idle',NULL,NULL,1795000000.0,1795000000.0,1795000000.0,NULL,NULL);
CREATE INDEX rollouts_queue ON rollouts (priority DESC, position) WHERE status IN ('queuing', 'requeuing') AND position IS NOT NULL;
CREATE INDEX rollouts_delayed ON rollouts (not_before) WHERE status IN ('queuing', 'requeuing') AND position IS NULL;
CREATE INDEX rollouts_watched ON rollouts (ordinal)
    WHERE status IN ('preparing', 'running') AND (timeout_seconds IS NOT NULL OR unresponsive_seconds IS NOT NULL);
CREATE INDEX rollouts_status ON rollouts (status);
CREATE UNIQUE INDEX attempts_of_rollout ON attempts (rollout_id, sequence_id);
CREATE INDEX resources_current ON resources (update_time, ordinal) WHERE is_current = 1;
CREATE INDEX enqueue_keys_rollout ON enqueue_keys (rollout_id);
CREATE INDEX answers_age ON answers (created_at);
COMMIT;
