-- Which run a rollout belongs to, and how many rollouts each run has: grouping 100,000 rollouts took 0.4 s for each look at the runs.

ALTER TABLE rollouts ADD COLUMN run TEXT NOT NULL DEFAULT '';   -- what metadata names, else the set of resources (operations/runs.py)
ALTER TABLE rollouts ADD COLUMN step INTEGER;                   -- what metadata names
-- sqlite: UPDATE rollouts SET
-- sqlite:     run = coalesce(CASE WHEN json_valid(metadata) AND json_type(metadata, '$.run') = 'text' THEN json_extract(metadata, '$.run') END, resources_id, ''),
-- sqlite:     step = CASE WHEN json_valid(metadata) AND json_type(metadata, '$.step') = 'integer' THEN json_extract(metadata, '$.step') END;
-- postgres: UPDATE rollouts SET run = coalesce(substring(metadata from '"run": ?"([^"\\]{1,256})"'), resources_id, ''),
-- postgres:     step = substring(metadata from '"step": ?([0-9]{1,9})[,}]')::bigint;

-- Changed in the transaction that changes a rollout, as tallies are. Times and steps are those of all rollouts that were ever counted here.
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
-- postgres: ALTER TABLE run_tallies SET (fillfactor = 50);
INSERT INTO run_tallies (run, status, mode, shard, rollouts, attempts, first_start, last_end, last_step)
SELECT run, status, coalesce(mode, ''), 0, count(*), sum(attempt_count), min(start_time), max(end_time), max(step)
FROM rollouts GROUP BY run, status, coalesce(mode, '');
