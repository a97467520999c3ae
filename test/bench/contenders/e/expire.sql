-- The job, again and again until it finds nothing.  Row addresses are the
-- cheapest way to name a batch.
DELETE FROM key_e WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM key_e WHERE expires_at < now() ORDER BY expires_at LIMIT 5000))
