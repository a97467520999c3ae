-- The key alone, without any work.
\set n random(1, 1000000000000000000)
BEGIN;
INSERT INTO key_f (key, day)
SELECT k, day_f(:day, now()) FROM (VALUES ('order:' || :n)) v (k)
 WHERE NOT EXISTS (SELECT FROM key_f f WHERE f.key = k) ON CONFLICT DO NOTHING;
UPDATE key_f SET result = '{"invoice_no": 17}', completed_at = now()
 WHERE key = 'order:' || :n AND day = day_f(:day, now());
COMMIT;
