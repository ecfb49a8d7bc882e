-- Announcements that expire, counters so that no question has to count rows, and the dead letters in the order in which they died.

ALTER TABLE services ADD COLUMN seconds REAL;   -- how long an announcement holds; null: until the service says that it has gone

-- How many there are: 'rollouts/STATUS/MODE', 'claimable', 'attempts'. Changed in the transaction that changes what is counted, so that
-- they are right after a crash; several rows for a name where several connections write at once, or each commit would wait for the others.
CREATE TABLE tallies (
    name TEXT NOT NULL,
    shard INTEGER NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (name, shard)
) WITHOUT ROWID;
-- postgres: ALTER TABLE tallies SET (fillfactor = 50);
INSERT INTO tallies (name, shard, count) SELECT 'rollouts/' || status || '/' || coalesce(mode, ''), 0, count(*) FROM rollouts GROUP BY status, mode;
INSERT INTO tallies (name, shard, count) SELECT 'claimable', 0, count(*) FROM rollouts WHERE status IN ('queuing', 'requeuing') AND position IS NOT NULL;
INSERT INTO tallies (name, shard, count) SELECT 'attempts', 0, count(*) FROM attempts;

CREATE INDEX rollouts_dead ON rollouts (end_time) WHERE status = 'failed';
