\set n random(1, :rows)
SELECT true AS completed, result::text FROM key_b WHERE key = 'order:' || :n;
