--
-- idem_claim_batch(): many claims in one call
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

SELECT pg_get_function_arguments(oid), pg_get_function_result(oid),
	   provolatile, proisstrict, proparallel
FROM pg_proc WHERE proname = 'idem_claim_batch';

-- Answers come in the given order; a key twice in one batch is claimed once
SELECT idem_once('batch:done');
BEGIN;
SELECT * FROM idem_claim_batch('{batch:z,batch:a,batch:m,batch:a,batch:b}');
SELECT ordinality, key, claimed, status FROM idem_claim_batch('{batch:new,batch:done,batch:z}');
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
SELECT idem_complete(k, to_json(k)) FROM unnest('{batch:a,batch:b,batch:m,batch:new,batch:z}'::text[]) AS k;
SELECT ordinality, key, claimed, status, result, completed_at IS NOT NULL AS completed
FROM idem_claim_batch('{batch:b,batch:done,batch:a}');
COMMIT;
SELECT ordinality, key, claimed, status, result, completed_at IS NOT NULL AS completed
FROM idem_claim_batch('{batch:b,batch:done,batch:a,batch:b}');

-- Claim and complete in one statement
CREATE TABLE batch_effect (key text, n int);
WITH c AS (
	SELECT key, ordinality FROM idem_claim_batch('{batch:1,batch:2,batch:done,batch:1,batch:3}')
	WHERE claimed
), effects AS (
	INSERT INTO batch_effect SELECT key, ordinality FROM c
)
SELECT key, idem_complete(key, ordinality) FROM c ORDER BY key;
SELECT key, idem_complete(key, ordinality)
FROM idem_claim_batch('{batch:2,batch:5,batch:1,batch:5}') WHERE claimed;
SELECT ordinality, key, status, result FROM idem_claim_batch('{batch:1,batch:2,batch:3,batch:5}');
SELECT * FROM batch_effect ORDER BY 1;

-- One that is left unfinished undoes all
SELECT key, idem_complete(key) FROM idem_claim_batch('{batch:6,batch:7}') WHERE key = 'batch:6';
SELECT count(*) FROM idem_lookup('batch:6');

-- Requests, one for each key, NULL where there is none
BEGIN;
SELECT idem_complete(key) FROM idem_claim_batch('{batch:r1,batch:r2,batch:r3}',
	ARRAY['[1]', NULL, '[3.0]']::jsonb[]);
COMMIT;
SELECT ordinality, key, claimed, status FROM idem_claim_batch('{batch:r1,batch:r2,batch:r3,batch:r1}',
	ARRAY['[ 1 ]', '[2]', '[4]', NULL]::jsonb[]);
SELECT * FROM idem_claim_batch('{batch:r1,batch:r2}', ARRAY['1']::jsonb[]);
SELECT * FROM idem_claim_batch('{batch:r1}', '{}');
SELECT * FROM idem_claim_batch('{}', ARRAY['1']::jsonb[]);
-- ... a key twice in one batch with two requests: the second is held, as ever
BEGIN;
SELECT ordinality, key, claimed, status
FROM idem_claim_batch('{batch:r4,batch:r4}', ARRAY['1', '2']::jsonb[]);
SELECT idem_complete('batch:r4');
COMMIT;
SELECT status FROM idem_try_claim('batch:r4', '1');
SELECT status FROM idem_try_claim('batch:r4', '2');

-- Every state is an answer, none an error
INSERT INTO idem_completions (key, status, lease_until, result, fingerprint)
VALUES ('batch:s1', 'leased', 'infinity', NULL, NULL),
	   ('batch:s2', 'leased', '-infinity', NULL, NULL),
	   ('batch:s3', 'skipped', NULL, NULL, NULL),
	   ('batch:s4', 'released', NULL, NULL, NULL),
	   ('batch:s5', 'completed', NULL, '5', idem_fingerprint('1')),
	   ('batch:s6', 'completed', NULL, '{"b":1.10, "a":2}', NULL);
BEGIN;
SELECT ordinality, key, claimed, status, result, lease_until
FROM idem_claim_batch('{batch:s6,batch:s5,batch:s4,batch:s3,batch:s2,batch:s1,batch:s0}',
	array_fill('2'::jsonb, '{7}'));
ROLLBACK;

-- Empty, NULL, and shapes of arrays
SELECT * FROM idem_claim_batch('{}');
SELECT * FROM idem_claim_batch(NULL);
SELECT * FROM idem_claim_batch('{batch:n,NULL}');
SELECT * FROM idem_claim_batch(ARRAY['batch:n', '']);
SELECT * FROM idem_claim_batch(ARRAY[E'batch:\t', 'batch:n']);
SELECT * FROM idem_claim_batch('{batch:n}', store => NULL);
SELECT * FROM idem_claim_batch('{batch:n}', wait => '-1 s');
BEGIN;
SELECT ordinality, key, claimed FROM idem_claim_batch('{{batch:d1,batch:d2},{batch:d3,batch:d1}}');
SELECT ordinality, key, claimed FROM idem_claim_batch('[5:6]={batch:d4,batch:d5}');
ROLLBACK;
-- ... all keys are checked before the first is claimed
BEGIN;
SAVEPOINT s;
SELECT * FROM idem_claim_batch(ARRAY['batch:ok', NULL]);
ROLLBACK TO s;
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
COMMIT;

-- Where nothing may be written
BEGIN READ ONLY;
SELECT * FROM idem_claim_batch('{batch:done}');
ROLLBACK;

-- In the target list and joined to what it is for
BEGIN;
SELECT (b).ordinality, (b).key, (b).claimed
FROM (SELECT idem_claim_batch('{batch:t1,batch:t2}') AS b OFFSET 0) AS s;
SELECT o.id, c.claimed
FROM (VALUES (1, 'batch:t3'), (2, 'batch:t1'), (3, 'batch:t4')) AS o(id, key)
JOIN idem_claim_batch('{batch:t4,batch:t1,batch:t3}') AS c USING (key) ORDER BY 1;
ROLLBACK;
-- ... a batch claims all its keys, even if only some rows are fetched
BEGIN;
SELECT key, claimed FROM idem_claim_batch('{batch:t1,batch:t2,batch:t3}') LIMIT 1;
SELECT ordinality, status FROM idem_claim_batch('{batch:t3,batch:t2,batch:t1}');
ROLLBACK;

-- Another store
SELECT idem_create_store('batch_other');
BEGIN;
SELECT key, claimed, idem_complete(key, '"other"', store => 'batch_other')
FROM idem_claim_batch('{batch:done,batch:1}', store => 'batch_other') WHERE claimed;
COMMIT;
SELECT ordinality, status, result FROM idem_claim_batch('{batch:1,batch:done}', store => 'batch_other');

-- A thousand keys of which every third was done before
SELECT count(*) FILTER (WHERE idem_once('batch:k:' || i)) FROM generate_series(3, 1000, 3) AS i;
BEGIN;
SELECT status, count(*), count(*) FILTER (WHERE key = 'batch:k:' || ordinality) AS in_order,
	   count(*) FILTER (WHERE (ordinality % 3 = 0) = (status = 'completed')) AS right_answer
FROM idem_claim_batch((SELECT array_agg('batch:k:' || i ORDER BY i) FROM generate_series(1, 1000) AS i))
GROUP BY 1 ORDER BY 1;
SELECT count(idem_complete('batch:k:' || i, i)) FROM generate_series(1, 1000) AS i WHERE i % 3 <> 0;
COMMIT;
SELECT status, count(*), sum(result::text::int)
FROM idem_claim_batch((SELECT array_agg('batch:k:' || i ORDER BY i) FROM generate_series(1, 1000) AS i))
GROUP BY 1;

SET client_min_messages = error;
DROP TABLE batch_effect, batch_other;
TRUNCATE idem_completions;
