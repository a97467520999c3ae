\set n random(1, 1000000000000000000)
BEGIN;
INSERT INTO key_a_same (key) VALUES ('order:' || :n) ON CONFLICT DO NOTHING;
INSERT INTO invoice (job, amount) VALUES ('order:' || :n, 4200);
COMMIT;
