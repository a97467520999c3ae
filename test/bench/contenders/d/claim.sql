-- Phase 1 takes the key, phase 2 works, phase 3 stores the answer.
\set n random(1, 1000000000000000000)
BEGIN ISOLATION LEVEL SERIALIZABLE;
INSERT INTO key_d (key) VALUES ('order:' || :n) ON CONFLICT DO NOTHING;
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
INSERT INTO invoice (job, amount) VALUES ('order:' || :n, 4200);
UPDATE key_d SET recovery_point = 'collected' WHERE key = 'order:' || :n;
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
UPDATE key_d SET recovery_point = 'finished', locked_at = NULL, result = '{"invoice_no": 17}'
 WHERE key = 'order:' || :n;
COMMIT;
