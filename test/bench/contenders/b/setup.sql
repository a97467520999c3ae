-- (b) The same with the result, which is put there by an UPDATE at the end.
-- json rather than jsonb: cheaper, and it replays the bytes.  The result is in
-- no index and the row's page is the one just filled, so nearly all of these
-- updates are HOT; a lower fillfactor would not help.
SET client_min_messages = warning;
DROP TABLE IF EXISTS key_b;
CREATE TABLE key_b (
    key text COLLATE "C" PRIMARY KEY,
    result json,
    created_at timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz
);
INSERT INTO key_b (key, result, completed_at)
    SELECT 'order:' || i, '{"invoice_no": 17}', now() FROM generate_series(1, :rows) i;
VACUUM (ANALYZE) key_b;
