-- Without a request.
\set n random(1, 1000000000000000000)
BEGIN;
SELECT claimed, result::text FROM claim_c('order:' || :n, NULL);
INSERT INTO invoice (job, amount) VALUES ('order:' || :n, 4200);
UPDATE key_c SET result = '{"invoice_no": 17}', completed_at = now() WHERE key = 'order:' || :n;
COMMIT;
