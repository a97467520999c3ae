\set n random(1, 1000000000000000000)
BEGIN;
INSERT INTO key_f (key, day)
SELECT k, day_f(:day, now()) FROM (VALUES ('order:' || :n)) v (k)
 WHERE NOT EXISTS (SELECT FROM key_f f WHERE f.key = k) ON CONFLICT DO NOTHING;
INSERT INTO invoice (job, amount) VALUES ('order:' || :n, 4200);
UPDATE key_f SET result = '{"invoice_no": 17}', completed_at = now()
 WHERE key = 'order:' || :n AND day = day_f(:day, now());
COMMIT;
