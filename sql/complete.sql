--
-- idem_complete() and idem_release(): the two ends of a claim
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

SELECT proname, proargnames, proargtypes::regtype[], prorettype::regtype,
	   pronargdefaults, provolatile, proisstrict, proparallel
FROM pg_proc WHERE proname IN ('idem_complete', 'idem_release')
ORDER BY proname, proargtypes::regtype[]::text;

-- What idem_complete() returns is what it stored and what is replayed
BEGIN;
SELECT claimed FROM idem_claim('complete:a', '[1]');
SELECT idem_complete('complete:a', '{"b":1.10,"a":1e2}');
COMMIT;
SELECT result FROM idem_claim('complete:a');
SELECT key, status, attempts, token, claimed_at <= completed_at AS in_order,
	   lease_until, claimed_by, fingerprint = idem_fingerprint('[1]') AS fingerprint,
	   checkpoint, result, generation
FROM idem_completions;

-- One row, written once: no update, no dead version
SELECT ctid, xmax FROM idem_completions;

-- A handler can return it
CREATE FUNCTION complete_handler(k text) RETURNS json LANGUAGE plpgsql AS $$
DECLARE c idem_outcome;
BEGIN
	c := idem_claim(k);
	IF NOT c.claimed THEN
		RETURN c.result;
	END IF;
	RETURN idem_complete(k, json_build_object('made', k));
END $$;
SELECT complete_handler('complete:handler'), complete_handler('complete:handler');
SELECT complete_handler('complete:handler');

-- Only a claim of this transaction is completed, and only once
SELECT idem_complete('complete:none');
SELECT idem_complete('complete:none', '1');
SELECT idem_complete('complete:none', 1);
SELECT idem_complete('complete:a', '1');
BEGIN;
SELECT claimed FROM idem_claim('complete:twice');
SELECT idem_complete('complete:twice', '1');
SAVEPOINT s;
SELECT idem_complete('complete:twice', '1');
ROLLBACK TO s;
SELECT idem_complete('complete:twice', '2');
ROLLBACK TO s;
COMMIT;
SELECT result FROM idem_claim('complete:twice');
-- ... a replay is no claim
BEGIN;
SELECT claimed FROM idem_claim('complete:twice');
SELECT idem_complete('complete:twice', '3');
ROLLBACK;
-- ... a claim of the same key in another store is not this one
SELECT idem_create_store('complete_other');
BEGIN;
SELECT claimed FROM idem_claim('complete:b', store => 'complete_other');
SAVEPOINT s;
SELECT idem_complete('complete:b', '1');
ROLLBACK TO s;
SELECT idem_complete('complete:b', '1', store => 'complete_other');
COMMIT;
SELECT count(*) FROM idem_lookup('complete:b');
-- ... a key that differs only by a space is another
BEGIN;
SELECT claimed FROM idem_claim('complete:c');
SELECT idem_complete('complete:c ', '1');
ROLLBACK;

-- With a token it is a lease that is meant, and never the claim
BEGIN;
SELECT claimed FROM idem_claim('complete:token');
SAVEPOINT s;
SELECT idem_complete('complete:token', '1', token => 1);
ROLLBACK TO s;
SELECT idem_release('complete:token', token => 1);
SELECT status FROM idem_claim('complete:token');
SELECT idem_complete('complete:token', '1', token => NULL);
COMMIT;
SELECT idem_complete('complete:token', '1', token => 1);
SELECT idem_complete('complete:none', '1', token => 1);
-- ... and without one never a lease
INSERT INTO idem_completions (key, status, token, lease_until)
VALUES ('complete:leased', 'leased', 4, 'infinity'),
	   ('complete:lease_over', 'leased', 5, '-infinity');
SELECT idem_complete('complete:leased', '1');
SELECT idem_complete('complete:lease_over', '1');
SELECT idem_release('complete:leased'), idem_release('complete:lease_over');
SELECT key, status FROM idem_completions WHERE key LIKE 'complete:lease%' ORDER BY 1;

-- Release: nothing was done; the record is not there and never was
SELECT idem_release('complete:none'), idem_release('complete:a');
BEGIN;
SELECT idem_release('complete:r');
SELECT claimed FROM idem_claim('complete:r', '[1]');
SELECT idem_release('complete:r');
SELECT idem_release('complete:r');
SAVEPOINT s;
SELECT idem_complete('complete:r', '1');
ROLLBACK TO s;
-- the lock stays
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
-- a claim after it starts anew, with a request of its own
SELECT claimed, status FROM idem_claim('complete:r', '[2]');
SELECT idem_complete('complete:r', '2');
SELECT status FROM idem_try_claim('complete:r', '[1]');
SELECT idem_release('complete:r');
COMMIT;
SELECT status FROM idem_try_claim('complete:r', '[2]');
SELECT attempts FROM idem_lookup('complete:r');
BEGIN;
SELECT claimed FROM idem_claim('complete:gone');
SELECT idem_release('complete:gone');
COMMIT;
SELECT count(*) FROM idem_lookup('complete:gone');

-- A record that says "released" is replaced: where it is in the current
-- generation, moved from another; attempts go on counting
INSERT INTO idem_completions (key, status, attempts, generation, token, checkpoint, lease_until, claimed_by)
VALUES ('complete:here', 'released', 3, 0, 7, '1', 'infinity', 'x'),
	   ('complete:moved', 'released', 4, 2, 7, '1', 'infinity', 'x'),
	   ('complete:null', 'released', NULL, 3, 7, '1', 'infinity', 'x');
BEGIN;
SELECT k, claimed, idem_complete(k, to_json(k))
FROM unnest('{complete:here,complete:moved,complete:null}'::text[]) AS k,
	 LATERAL (SELECT claimed FROM idem_claim(k)) AS c;
COMMIT;
SELECT key, status, attempts, token, lease_until, claimed_by, checkpoint, generation, result
FROM idem_completions
WHERE key IN ('complete:here', 'complete:moved', 'complete:null')
ORDER BY 1;
-- ... even if it stands twice, in whatever generations
INSERT INTO idem_completions (key, status, generation)
VALUES ('complete:twice_01', 'released', 0), ('complete:twice_01', 'released', 1),
	   ('complete:twice_12', 'released', 1), ('complete:twice_12', 'released', 2);
SELECT idem_once('complete:twice_01');
SELECT idem_once('complete:twice_01');
SELECT idem_once('complete:twice_12');
SELECT idem_once('complete:twice_12');
-- ... undone by a rollback
INSERT INTO idem_completions (key, status, attempts, generation)
VALUES ('complete:back', 'released', 3, 1);
BEGIN;
SELECT idem_once('complete:back');
SELECT key, status, attempts, generation FROM idem_completions WHERE key = 'complete:back';
ROLLBACK;
SELECT key, status, attempts, generation FROM idem_completions WHERE key = 'complete:back';
-- ... and one that was released, claimed and released again stays as it was
BEGIN;
SELECT claimed FROM idem_claim('complete:back');
SELECT idem_release('complete:back');
COMMIT;
SELECT key, status, attempts, generation FROM idem_completions WHERE key = 'complete:back';

-- NULL and bad arguments
SELECT idem_complete(NULL, '1');
SELECT idem_complete('', '1');
SELECT idem_complete('complete:none', '1', store => NULL);
SELECT idem_release(NULL);
SELECT idem_release(E'a\nb');
SELECT idem_release('complete:none', store => NULL);

-- Read only
BEGIN;
SELECT claimed FROM idem_claim('complete:ro');
SET TRANSACTION READ ONLY;
SAVEPOINT s;
SELECT idem_complete('complete:ro', '1');
ROLLBACK TO s;
SELECT idem_release('complete:ro');
ROLLBACK;

-- Complete many in one statement, in the order they come
BEGIN;
SELECT count(*) FROM generate_series(1, 20) AS i, LATERAL (SELECT * FROM idem_claim('complete:many:' || i)) AS c;
SELECT count(idem_complete('complete:many:' || i, i)) FROM generate_series(20, 1, -1) AS i;
COMMIT;
SELECT count(*), sum(result::text::int) FROM idem_completions WHERE key LIKE 'complete:many:%';

SET client_min_messages = error;
DROP TABLE complete_other;
DROP FUNCTION complete_handler;
TRUNCATE idem_completions;
