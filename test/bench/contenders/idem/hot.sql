-- All clients come with the same key.
SELECT claimed, result::text FROM idem_claim('order:1');
