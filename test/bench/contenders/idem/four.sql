-- The same as idem_run in as few statements as can be without it: four.
\set n random(1, 1000000000000000000)
BEGIN;
SELECT claimed, result::text
  FROM idem_claim('order:' || :n, jsonb_build_object('job', 'order:' || :n, 'amount', 4200));
WITH work AS (INSERT INTO invoice (job, amount) VALUES ('order:' || :n, 4200) RETURNING no)
SELECT idem_complete('order:' || :n, '{"invoice_no": 17}') FROM work;
COMMIT;
