-- A result of 1 kB.
\set n random(1, 1000000000000000000)
BEGIN;
SELECT claimed, result::text FROM idem_claim('order:' || :n);
INSERT INTO invoice (job, amount) VALUES ('order:' || :n, 4200);
SELECT idem_complete('order:' || :n, :result);
COMMIT;
