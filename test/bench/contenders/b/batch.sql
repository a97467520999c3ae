-- 1,000 keys in one statement, in their order, so that two batches with common
-- keys do not deadlock.
\set n random(1, 1000000000000000000)
BEGIN;
INSERT INTO key_b (key)
SELECT 'row:' || :n || ':' || i FROM generate_series(1, 1000) i ORDER BY 1 ON CONFLICT DO NOTHING;
UPDATE key_b SET result = '{"invoice_no": 17}', completed_at = now()
  FROM generate_series(1, 1000) i WHERE key = 'row:' || :n || ':' || i;
COMMIT;
