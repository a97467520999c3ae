--
-- Savepoints: what a subtransaction claimed, completed or released goes with
-- it, lock and all, and comes back as it was before
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

CREATE VIEW savepoints_key_locks AS
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
CREATE VIEW savepoints_writer_locks AS
SELECT count(*) AS writer_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'relation' AND mode = 'RowExclusiveLock'
AND relation = 'idem_completions_0'::regclass;

-- A claim in a savepoint that is rolled back is gone, lock and all
BEGIN;
SAVEPOINT s;
SELECT claimed FROM idem_claim('s:a');
TABLE savepoints_key_locks;
ROLLBACK TO s;
TABLE savepoints_key_locks;
SAVEPOINT s2;
SELECT idem_complete('s:a', '1');
ROLLBACK TO s2;
SELECT idem_release('s:a');
COMMIT;
-- ... one that is released is the transaction's, and open
BEGIN;
SAVEPOINT s;
SELECT claimed FROM idem_claim('s:a');
RELEASE s;
TABLE savepoints_key_locks;
SELECT status FROM idem_claim('s:a');
COMMIT;
BEGIN;
SAVEPOINT s;
SELECT claimed FROM idem_claim('s:a');
RELEASE s;
SELECT idem_complete('s:a', '"after release"');
COMMIT;
SELECT status, result FROM idem_claim('s:a');

-- A completion undone by ROLLBACK TO leaves the claim unfinished again
BEGIN;
SELECT claimed FROM idem_claim('s:b');
SAVEPOINT s;
SELECT idem_complete('s:b', '1');
TABLE savepoints_writer_locks;
ROLLBACK TO s;
TABLE savepoints_key_locks;
SELECT status FROM idem_claim('s:b');
COMMIT;
SELECT count(*) FROM idem_lookup('s:b');
BEGIN;
SELECT claimed FROM idem_claim('s:b');
SAVEPOINT s;
SELECT idem_complete('s:b', '1');
ROLLBACK TO s;
SELECT idem_complete('s:b', '2');
ROLLBACK TO s;
SELECT idem_complete('s:b', '3');
RELEASE s;
COMMIT;
SELECT result, attempts FROM idem_lookup('s:b');

-- A release undone by ROLLBACK TO makes the claim held and unfinished again
BEGIN;
SELECT claimed FROM idem_claim('s:c');
SAVEPOINT s;
SELECT idem_release('s:c');
ROLLBACK TO s;
SELECT status FROM idem_claim('s:c');
COMMIT;
BEGIN;
SELECT claimed FROM idem_claim('s:c', '[1]');
SAVEPOINT s;
SELECT idem_release('s:c');
SELECT claimed FROM idem_claim('s:c', '[2]');
SELECT idem_complete('s:c', '2');
ROLLBACK TO s;
SELECT status FROM idem_claim('s:c');
SELECT idem_complete('s:c', '1');
COMMIT;
SELECT status, result FROM idem_claim('s:c', '[1]');
SELECT status, result FROM idem_try_claim('s:c', '[2]');

-- A completed key, ROLLBACK TO, then released
BEGIN;
SELECT claimed FROM idem_claim('s:d');
SAVEPOINT s;
SELECT idem_complete('s:d', '1');
ROLLBACK TO s;
SELECT idem_release('s:d');
COMMIT;
SELECT count(*) FROM idem_lookup('s:d');

-- A release in the savepoint of the claim, and of one further in
BEGIN;
SAVEPOINT s1;
SELECT claimed FROM idem_claim('s:e');
SAVEPOINT s2;
SELECT idem_release('s:e');
SAVEPOINT s3;
SELECT claimed FROM idem_claim('s:e');
RELEASE s2;
SELECT status FROM idem_claim('s:e');
ROLLBACK TO s1;
TABLE savepoints_key_locks;
SELECT idem_release('s:e');
COMMIT;

-- Many levels; each takes back its own
BEGIN;
SELECT claimed FROM idem_claim('s:n');
SAVEPOINT l2;
SELECT idem_complete('s:n', '2');
SAVEPOINT l3;
SELECT idem_forget('s:n');
SAVEPOINT l4;
SELECT claimed FROM idem_claim('s:n');
SAVEPOINT l5;
SELECT idem_complete('s:n', '5');
SAVEPOINT l6;
SELECT idem_forget('s:n');
SELECT claimed FROM idem_try_claim('s:n');
ROLLBACK TO l6;
SELECT status, result FROM idem_try_claim('s:n');
ROLLBACK TO l5;
SELECT status FROM idem_try_claim('s:n');
ROLLBACK TO l4;
SAVEPOINT l5;
SELECT claimed FROM idem_try_claim('s:n');
ROLLBACK TO l5;
RELEASE l5;
ROLLBACK TO l3;
SELECT status, result FROM idem_try_claim('s:n');
ROLLBACK TO l2;
SELECT status FROM idem_try_claim('s:n');
SELECT idem_complete('s:n', '1');
COMMIT;
SELECT count(*), min(result::text) FROM idem_completions WHERE key = 's:n';
-- ... RELEASE hands everything to the parent, whose rollback takes it all
BEGIN;
SAVEPOINT l2;
SELECT claimed FROM idem_claim('s:m');
SAVEPOINT l3;
SELECT idem_complete('s:m', '1');
SAVEPOINT l4;
SELECT idem_forget('s:m');
RELEASE l4;
RELEASE l3;
SELECT claimed FROM idem_try_claim('s:m');
ROLLBACK TO l2;
SELECT idem_release('s:m');
TABLE savepoints_key_locks;
COMMIT;
BEGIN;
SELECT claimed FROM idem_claim('s:m');
SAVEPOINT l2;
SAVEPOINT l3;
SELECT idem_complete('s:m', '3');
RELEASE l3;
SELECT status FROM idem_try_claim('s:m');
ROLLBACK TO l2;
SELECT status FROM idem_try_claim('s:m');
SAVEPOINT l3;
SELECT idem_release('s:m');
RELEASE l3;
ROLLBACK TO l2;
SELECT status FROM idem_try_claim('s:m');
RELEASE l2;
ROLLBACK;

-- The same key in the same savepoint again and again
BEGIN;
SAVEPOINT s;
SELECT claimed FROM idem_claim('s:again');
ROLLBACK TO s;
SELECT claimed FROM idem_claim('s:again');
ROLLBACK TO s;
SELECT claimed FROM idem_claim('s:again');
SELECT idem_complete('s:again');
ROLLBACK TO s;
SELECT claimed FROM idem_claim('s:again');
SELECT idem_complete('s:again', '4');
COMMIT;
SELECT result FROM idem_claim('s:again');

-- Replays in a savepoint leave nothing, whatever becomes of it
BEGIN;
SAVEPOINT s;
SELECT status FROM idem_claim('s:again');
RELEASE s;
SAVEPOINT s;
SELECT status FROM idem_claim('s:again');
ROLLBACK TO s;
TABLE savepoints_key_locks;
COMMIT;
-- ... nor does one of an own completion take the lock along
BEGIN;
SELECT idem_once('s:own');
SAVEPOINT s;
SELECT status FROM idem_claim('s:own');
SELECT status FROM idem_try_claim('s:own');
ROLLBACK TO s;
TABLE savepoints_key_locks;
COMMIT;

-- A made record of another generation comes back
INSERT INTO idem_completions (key, status, generation) VALUES ('s:gen', 'released', 2);
BEGIN;
SAVEPOINT s;
SELECT idem_once('s:gen');
ROLLBACK TO s;
SELECT status, generation FROM idem_completions WHERE key = 's:gen';
SELECT idem_once('s:gen');
SAVEPOINT s;
SELECT idem_forget('s:gen');
ROLLBACK TO s;
COMMIT;
SELECT status, generation FROM idem_completions WHERE key = 's:gen';

-- PL/pgSQL: a block with EXCEPTION is a savepoint
DO $$
DECLARE
	c idem_outcome;
BEGIN
	BEGIN
		PERFORM idem_claim('s:pl');
		PERFORM idem_complete('s:pl', '"undone"');
		RAISE EXCEPTION 'x';
	EXCEPTION WHEN raise_exception THEN
		NULL;
	END;
	ASSERT NOT EXISTS (SELECT FROM idem_lookup('s:pl'));
	c := idem_claim('s:pl');
	ASSERT c.claimed;
	BEGIN
		PERFORM idem_complete('s:pl', '{"invalid"');
	EXCEPTION WHEN invalid_text_representation THEN
		NULL;
	END;
	c := idem_claim('s:pl');
	ASSERT c.status = 'held';
	BEGIN
		PERFORM idem_complete('s:pl', '"done"');
	EXCEPTION WHEN OTHERS THEN
		RAISE;
	END;
	c := idem_claim('s:pl');
	ASSERT c.status = 'completed' AND c.result::text = '"done"';
END $$;
SELECT result, attempts FROM idem_lookup('s:pl');
-- ... ID001 caught leaves the transaction as it was
CREATE FUNCTION savepoints_catch(k text, r jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	RETURN (SELECT status FROM idem_claim(k, r, wait => '0'));
EXCEPTION
	WHEN SQLSTATE 'ID001' THEN RETURN 'ID001';
END $$;
BEGIN;
SELECT savepoints_catch('s:caught', '1');
SELECT idem_complete('s:caught');
SELECT savepoints_catch('s:caught', '2');
SELECT savepoints_catch('s:caught', '1');
COMMIT;
SELECT savepoints_catch('s:caught', '2');

-- A thousand savepoints, every second rolled back
DO $$
BEGIN
	FOR i IN 1..1000 LOOP
		BEGIN
			PERFORM idem_claim('s:k:' || i), idem_complete('s:k:' || i, i);
			IF i % 2 = 0 THEN
				PERFORM 1 / 0;
			END IF;
		EXCEPTION WHEN division_by_zero THEN
			NULL;
		END;
	END LOOP;
END $$;
SELECT count(*), sum(result::text::int) FROM idem_completions WHERE key LIKE 's:k:%';
-- ... completed by the others, in savepoints of one transaction, last in a rolled back one
DO $$
DECLARE
	claims int := 0;
BEGIN
	FOR i IN 1..1000 LOOP
		IF (SELECT claimed FROM idem_claim('s:k:' || i)) THEN
			claims := claims + 1;
		END IF;
	END LOOP;
	ASSERT claims = 500;
	FOR try IN 1..2 LOOP
		BEGIN
			FOR i IN 2..1000 BY 2 LOOP
				PERFORM idem_complete('s:k:' || i, i);
			END LOOP;
			IF try = 1 THEN
				RAISE division_by_zero;
			END IF;
		EXCEPTION WHEN division_by_zero THEN
			NULL;
		END;
	END LOOP;
END $$;
SELECT count(*), sum(result::text::int) FROM idem_completions WHERE key LIKE 's:k:%';

-- Cursors: the key's lock and the writer's lock belong to the transaction,
-- not to a portal that fails in a savepoint
CREATE FUNCTION savepoints_fail(i int) RETURNS int LANGUAGE plpgsql AS $$
BEGIN
	IF i = 2 THEN
		RAISE division_by_zero;
	END IF;
	RETURN i;
END $$;
BEGIN;
DECLARE c CURSOR FOR
SELECT savepoints_fail(i) AS i, (SELECT status FROM idem_claim('s:cursor:' || i))
FROM generate_series(1, 2) AS i;
FETCH c;
TABLE savepoints_key_locks;
SAVEPOINT s;
FETCH c;
ROLLBACK TO s;
TABLE savepoints_key_locks;
SELECT status FROM idem_claim('s:cursor:1');
SELECT idem_complete('s:cursor:1');
COMMIT;
-- ... the same for completions: the partition stays locked
BEGIN;
SELECT claimed FROM idem_claim('s:cursor:3');
DECLARE c CURSOR FOR
SELECT savepoints_fail(i) AS i, idem_complete('s:cursor:' || i + 2, i)
FROM generate_series(1, 2) AS i;
FETCH c;
TABLE savepoints_writer_locks;
SAVEPOINT s;
FETCH c;
ROLLBACK TO s;
TABLE savepoints_key_locks;
TABLE savepoints_writer_locks;
SELECT status, result FROM idem_claim('s:cursor:3');
COMMIT;
SELECT status, result FROM idem_claim('s:cursor:3');
-- ... a claim fetched inside the savepoint goes with it, its cursor does not matter
BEGIN;
DECLARE c CURSOR FOR
SELECT i, (SELECT status FROM idem_claim('s:cursor:' || i)) FROM generate_series(4, 6) AS i;
FETCH c;
SAVEPOINT s;
FETCH c;
ROLLBACK TO s;
TABLE savepoints_key_locks;
FETCH c;
SELECT idem_release('s:cursor:' || i) FROM generate_series(4, 6) AS i;
CLOSE c;
TABLE savepoints_key_locks;
COMMIT;
-- ... a cursor that is closed early keeps what it claimed
BEGIN;
SAVEPOINT s;
DECLARE c CURSOR FOR SELECT (SELECT status FROM idem_claim('s:cursor:' || i)) FROM generate_series(7, 9) AS i;
FETCH c;
CLOSE c;
RELEASE s;
TABLE savepoints_key_locks;
SELECT idem_complete('s:cursor:7');
COMMIT;
SELECT count(*) FROM idem_completions WHERE key LIKE 's:cursor:%';
-- ... and in PL/pgSQL, where a loop is a portal
DO $$
DECLARE
	r record;
BEGIN
	BEGIN
		FOR r IN SELECT i, idem_once('s:loop:' || i) AS first FROM generate_series(1, 20) AS i LOOP
			IF r.i = 15 THEN
				RAISE division_by_zero;
			END IF;
		END LOOP;
	EXCEPTION WHEN division_by_zero THEN
		NULL;
	END;
	FOR r IN SELECT i, idem_once('s:loop:' || i) AS first FROM generate_series(1, 20) AS i LOOP
		ASSERT r.first;
		EXIT WHEN r.i = 5;
	END LOOP;
END $$;
SELECT count(*) >= 5 AS at_least_5 FROM idem_completions WHERE key LIKE 's:loop:%';

-- The wait of a claim is a subtransaction of its own; it leaves no trace
SET lock_timeout = '1h';
BEGIN;
SAVEPOINT s;
SELECT claimed FROM idem_claim('s:wait', wait => '1 min');
SHOW lock_timeout;
RELEASE s;
SELECT idem_complete('s:wait');
COMMIT;
RESET lock_timeout;

-- Two stores, one key, one savepoint
SELECT idem_create_store('savepoints_other', '1 day', 2);
BEGIN;
SELECT claimed FROM idem_claim('s:two');
SAVEPOINT s;
SELECT claimed FROM idem_claim('s:two', store => 'savepoints_other');
SELECT idem_complete('s:two', '2');
ROLLBACK TO s;
SELECT claimed FROM idem_claim('s:two', store => 'savepoints_other');
SELECT status FROM idem_claim('s:two');
SELECT idem_complete('s:two', '1'), idem_complete('s:two', '3', store => 'savepoints_other');
COMMIT;
SELECT a.result, b.result FROM idem_lookup('s:two') a, idem_lookup('s:two', 'savepoints_other') b;

-- A store that a rolled-back savepoint made
BEGIN;
SAVEPOINT s;
SELECT idem_create_store('savepoints_gone');
SELECT idem_once('s:gone', store => 'savepoints_gone');
ROLLBACK TO s;
SELECT to_regclass('savepoints_gone');
SELECT idem_create_store('savepoints_gone');
SELECT idem_once('s:gone', store => 'savepoints_gone');
COMMIT;
SELECT idem_once('s:gone', store => 'savepoints_gone');

SET client_min_messages = error;
DROP TABLE savepoints_other, savepoints_gone;
DROP VIEW savepoints_key_locks, savepoints_writer_locks;
DROP FUNCTION savepoints_catch, savepoints_fail;
TRUNCATE idem_completions;
