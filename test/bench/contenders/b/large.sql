\set n random(1, 1000000000000000000)
BEGIN;
INSERT INTO key_b (key) VALUES ('order:' || :n) ON CONFLICT DO NOTHING;
INSERT INTO invoice (job, amount) VALUES ('order:' || :n, 4200);
UPDATE key_b SET result = :result, completed_at = now() WHERE key = 'order:' || :n;
COMMIT;
