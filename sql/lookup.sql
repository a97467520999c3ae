--
-- idem_lookup(): an ordinary read of the record of a key
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

SELECT pg_get_function_identity_arguments(oid), pg_get_function_result(oid),
	   provolatile, proisstrict, proparallel
FROM pg_proc WHERE proname = 'idem_lookup';

SELECT * FROM idem_lookup('lookup:none');
BEGIN;
SELECT claimed FROM idem_claim('lookup:a', '[1]');
-- a claim is no record
SELECT count(*) FROM idem_lookup('lookup:a');
SELECT idem_complete('lookup:a', '{"b":1.10}');
SELECT status, result FROM idem_lookup('lookup:a');
COMMIT;
SELECT key, status, attempts, token, claimed_at IS NOT NULL AS claimed_at,
	   completed_at IS NOT NULL AS completed_at, lease_until, claimed_by,
	   fingerprint, checkpoint, result, generation
FROM idem_lookup('lookup:a');
-- the whole row is what the table has
SELECT count(*) FROM idem_completions AS t, idem_lookup(t.key) AS l
WHERE t::text = l::text;

-- It takes no lock on the key and works where nothing may be written
BEGIN READ ONLY;
SELECT status FROM idem_lookup('lookup:a');
SELECT locktype, mode FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory';
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY DEFERRABLE;
SELECT status FROM idem_lookup('lookup:a');
COMMIT;

-- All columns, all generations; at most one row
INSERT INTO idem_completions VALUES
	('lookup:full', 'leased', 2, 9, '2021-01-01 00:00+00', '2021-01-01 00:01+00',
	 'infinity', 'me', '00000000-0000-8000-8000-000000000001', '{"step": 1}', '[ 1 ]', 3),
	('lookup:twice', 'released', 1, NULL, NULL, 'infinity', NULL, NULL, NULL, NULL, NULL, 0),
	('lookup:twice', 'completed', 1, NULL, NULL, '2020-01-01', NULL, NULL, NULL, NULL, '"old"', 2),
	('lookup:twice', 'completed', 1, NULL, NULL, '2020-01-02', NULL, NULL, NULL, NULL, '"new"', 1);
SET timezone = 'UTC';
SELECT attempts, token, claimed_at = '2021-01-01 00:00+00' AS claimed_at,
	   completed_at = '2021-01-01 00:01+00' AS completed_at, lease_until,
	   claimed_by, fingerprint, checkpoint, result, generation
FROM idem_lookup('lookup:full');
RESET timezone;
SELECT status, result, generation FROM idem_lookup('lookup:twice');

-- It sees what its snapshot sees: not what its own statement has done
SELECT idem_once('lookup:same'), (SELECT count(*) FROM idem_lookup('lookup:same'));
SELECT count(*) FROM idem_lookup('lookup:same');
BEGIN;
DECLARE c CURSOR FOR SELECT count(*) FROM generate_series(1, 1), idem_lookup('lookup:cursor');
SELECT idem_once('lookup:cursor');
FETCH c;
SELECT count(*) FROM idem_lookup('lookup:cursor');
ROLLBACK;
SELECT count(*) FROM idem_lookup('lookup:cursor');

-- As a set: joined, in the target list, in a subquery, in a function that is strict
SELECT k, l.status FROM unnest('{lookup:a,lookup:none,lookup:full}'::text[]) AS k
LEFT JOIN LATERAL idem_lookup(k) AS l ON true;
SELECT (idem_lookup('lookup:a')).status;
SELECT k, EXISTS (SELECT FROM idem_lookup(k)) FROM unnest('{lookup:a,lookup:none}'::text[]) AS k;
-- ... more rows than are read
BEGIN;
DECLARE c CURSOR FOR SELECT l.key FROM generate_series(1, 3), idem_lookup('lookup:a') AS l;
FETCH c;
COMMIT;

-- Other stores, other keys
SELECT idem_create_store('lookup_other');
SELECT count(*) FROM idem_lookup('lookup:a', 'lookup_other');
SELECT idem_once('lookup:a', store => 'lookup_other');
SELECT result FROM idem_lookup('lookup:a', 'lookup_other');
SELECT result FROM idem_lookup('lookup:a', store => 'idem_completions');
SELECT count(*) FROM idem_lookup('lookup:a ');
SELECT count(*) FROM idem_lookup('Lookup:a');

-- NULL and bad keys, and what is no store
SELECT * FROM idem_lookup(NULL);
SELECT * FROM idem_lookup('');
SELECT * FROM idem_lookup(repeat('x', 513));
SELECT * FROM idem_lookup('lookup:a', NULL);
SELECT * FROM idem_lookup('lookup:a', 'pg_class');
SELECT * FROM idem_lookup('lookup:a', 0);
SELECT * FROM idem_lookup('lookup:a', 'no_such_table');

-- The store can be changed in the same transaction
BEGIN;
ALTER TABLE lookup_other ADD COLUMN note text DEFAULT 'x';
SELECT count(*) FROM idem_lookup('lookup:a', 'lookup_other');
DROP TABLE lookup_other_1;
SELECT count(*) FROM idem_lookup('lookup:a', 'lookup_other');
ROLLBACK;
SELECT count(*) FROM idem_lookup('lookup:a', 'lookup_other');

SET client_min_messages = error;
DROP TABLE lookup_other;
TRUNCATE idem_completions;
