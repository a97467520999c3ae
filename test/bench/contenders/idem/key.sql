-- The key alone, without any work.
\set n random(1, 1000000000000000000)
BEGIN;
SELECT claimed, result::text FROM idem_claim('order:' || :n);
SELECT idem_complete('order:' || :n, '{"invoice_no": 17}');
COMMIT;
