-- (c) A PL/pgSQL function that does as much as idem_claim: locks the key, so
-- that a duplicate waits; looks it up; compares the request; and claims it.
-- The request's hash is the cheapest that is good enough: jsonb prints its
-- members in one order, and sha256 makes it short.
SET client_min_messages = warning;
DROP TABLE IF EXISTS key_c;
CREATE TABLE key_c (
    key text COLLATE "C" PRIMARY KEY,
    request_hash bytea,
    result json,
    created_at timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz
);
CREATE OR REPLACE FUNCTION claim_c(k text, request jsonb, OUT claimed boolean, OUT result json)
LANGUAGE plpgsql AS $$
DECLARE
    hash bytea := sha256(convert_to(request::text, 'UTF8'));
    found_hash bytea;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(k, 0));
    SELECT t.request_hash, t.result INTO found_hash, claim_c.result FROM key_c t WHERE t.key = k;
    claimed := NOT FOUND;
    IF claimed THEN
        INSERT INTO key_c (key, request_hash) VALUES (k, hash);
    ELSIF found_hash <> hash THEN
        RAISE 'key was used with another request' USING DETAIL = k;
    END IF;
END $$;
INSERT INTO key_c (key, request_hash, result, completed_at)
    SELECT 'order:' || i, sha256(i::text::bytea), '{"invoice_no": 17}', now()
      FROM generate_series(1, :rows) i;
VACUUM (ANALYZE) key_c;
