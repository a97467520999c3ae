\set n random(1, 1000000000000000000)
BEGIN;
INSERT INTO key_b (key) VALUES (rpad(:n, 512, '-collect')) ON CONFLICT DO NOTHING;
INSERT INTO invoice (job, amount) VALUES ('order:' || :n, 4200);
UPDATE key_b SET result = '{"invoice_no": 17}', completed_at = now() WHERE key = rpad(:n, 512, '-collect');
COMMIT;
