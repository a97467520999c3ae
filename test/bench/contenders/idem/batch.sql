-- 1,000 keys in one call.
\set n random(1, 1000000000000000000)
BEGIN;
SELECT count(*) FILTER (WHERE claimed)
  FROM idem_claim_batch(ARRAY(SELECT 'row:' || :n || ':' || i FROM generate_series(1, 1000) i));
SELECT count(idem_complete('row:' || :n || ':' || i, '{"invoice_no": 17}')) FROM generate_series(1, 1000) i;
COMMIT;
