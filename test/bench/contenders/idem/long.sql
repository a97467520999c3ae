-- A key of 512 bytes, the longest there is.
\set n random(1, 1000000000000000000)
BEGIN;
SELECT claimed, result::text FROM idem_claim(rpad(:n, 512, '-collect'));
INSERT INTO invoice (job, amount) VALUES ('order:' || :n, 4200);
SELECT idem_complete(rpad(:n, 512, '-collect'), '{"invoice_no": 17}');
COMMIT;
