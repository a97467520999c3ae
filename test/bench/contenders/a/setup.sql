-- (a) A key that is inserted, or is there already.  No result: a duplicate is
-- told that, and nothing more.  Collation C, as keys are compared only for
-- equality and it is the fastest.
SET client_min_messages = warning;
DROP TABLE IF EXISTS key_a, key_a_same;
CREATE TABLE key_a (
    key text COLLATE "C" PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO key_a (key) SELECT 'order:' || i FROM generate_series(1, :rows) i;

-- The same with the columns that a store of idem has, filled as idem_once
-- fills them, and one unique index.
CREATE TABLE key_a_same (
    key text COLLATE "C" PRIMARY KEY,
    status text NOT NULL DEFAULT 'completed',
    attempts int DEFAULT 1,
    token bigint,
    claimed_at timestamptz DEFAULT now(),
    completed_at timestamptz DEFAULT clock_timestamp(),
    lease_until timestamptz,
    claimed_by text,
    fingerprint uuid,
    checkpoint jsonb,
    result json,
    generation smallint NOT NULL DEFAULT 0
);
INSERT INTO key_a_same (key) SELECT 'order:' || i FROM generate_series(1, :rows) i;
VACUUM (ANALYZE) key_a, key_a_same;
