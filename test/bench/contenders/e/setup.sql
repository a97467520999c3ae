-- (e) As (b), and keys expire: expires_at with its index, a job that deletes in
-- batches, autovacuum.  Autovacuum is asked to come earlier than after its
-- default of 20% dead rows, as one does with a table that is deleted from all
-- the time.  :retention seconds; of :rows records an equal number expires in each
-- second from :start on, as in a table that has run for long.
SET client_min_messages = warning;
DROP TABLE IF EXISTS key_e;
CREATE TABLE key_e (
    key text COLLATE "C" PRIMARY KEY,
    result json,
    created_at timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz,
    expires_at timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX key_e_expires_at ON key_e (expires_at);
INSERT INTO key_e (key, result, completed_at, expires_at)
    SELECT 'order:' || (1e18 * random())::bigint, '{"invoice_no": 17}', now(),
           to_timestamp(:start + :retention * i::float8 / :rows)
      FROM generate_series(1, :rows) i;
VACUUM (ANALYZE) key_e;
