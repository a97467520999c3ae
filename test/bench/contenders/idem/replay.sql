\set n random(1, :rows)
SELECT claimed, result::text FROM idem_claim('order:' || :n);
