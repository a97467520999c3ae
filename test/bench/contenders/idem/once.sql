\set n random(1, 1000000000000000000)
BEGIN;
SELECT idem_once('order:' || :n);
INSERT INTO invoice (job, amount) VALUES ('order:' || :n, 4200);
COMMIT;
