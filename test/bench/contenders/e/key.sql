-- The key alone, without any work.
\set n random(1, 1000000000000000000)
BEGIN;
INSERT INTO key_e (key, expires_at)
VALUES ('order:' || :n, now() + make_interval(secs => :retention)) ON CONFLICT DO NOTHING;
UPDATE key_e SET result = '{"invoice_no": 17}', completed_at = now() WHERE key = 'order:' || :n;
COMMIT;
