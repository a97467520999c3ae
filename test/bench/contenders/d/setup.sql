-- (d) Atomic phases, as payment services do it: the key with a recovery point,
-- which each phase moves on, each in a SERIALIZABLE transaction of its own.
SET client_min_messages = warning;
DROP TABLE IF EXISTS key_d;
CREATE TABLE key_d (
    key text COLLATE "C" PRIMARY KEY,
    recovery_point text NOT NULL DEFAULT 'started',
    locked_at timestamptz DEFAULT now(),
    result json,
    created_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO key_d (key, recovery_point, locked_at, result)
    SELECT 'order:' || i, 'finished', NULL, '{"invoice_no": 17}' FROM generate_series(1, :rows) i;
VACUUM (ANALYZE) key_d;
