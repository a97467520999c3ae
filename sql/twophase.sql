--
-- PREPARE TRANSACTION: the claim and its completion wait with it
--
-- Where max_prepared_transactions is 0 (its default) none of this can be
-- tested: the expected output is then that of twophase_1.out.
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate
SELECT current_setting('max_prepared_transactions')::int < 2 AS skip \gset
\if :skip
\echo 'NOT TESTED: max_prepared_transactions is less than 2'
\quit
\endif

CREATE TABLE twophase_effect (key text);
CREATE FUNCTION twophase_work(k text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	IF (SELECT claimed FROM idem_claim(k, wait => '0')) THEN
		INSERT INTO twophase_effect VALUES (k);
		RETURN 'did ' || idem_complete(k, to_json(k))::text;
	END IF;
	RETURN 'done before';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END $$;

-- Prepared: others find the key in progress; committed: they find it done
BEGIN;
SELECT twophase_work('2p:a');
PREPARE TRANSACTION 'regress_idem_1';
SELECT claimed, status FROM idem_try_claim('2p:a');
SELECT twophase_work('2p:a');
SELECT status FROM idem_claim_batch('{2p:a}', wait => '1 ms');
SELECT count(*) FROM idem_lookup('2p:a');
\set VERBOSITY default
SELECT idem_claim('2p:a', wait => '0');
SELECT idem_claim('2p:a', wait => '1 ms');
SET idem.wait_timeout = '1ms';
SELECT idem_claim('2p:a');
SELECT idem_once('2p:a');
SELECT idem_forget('2p:a');
RESET idem.wait_timeout;
\set VERBOSITY sqlstate
-- ... lock_timeout and statement_timeout are errors of their own
SET lock_timeout = '1ms';
SELECT status FROM idem_claim('2p:a', wait => '10 min');
SELECT status FROM idem_try_claim('2p:a', wait => '10 min');
RESET lock_timeout;
SET statement_timeout = '1ms';
SELECT status FROM idem_claim('2p:a', wait => '10 min');
SELECT status FROM idem_try_claim('2p:a', wait => '100000 years');
RESET statement_timeout;
-- ... what a wait that ran out leaves: nothing
SET lock_timeout = '2h';
BEGIN;
SHOW lock_timeout;
SELECT status FROM idem_try_claim('2p:a', wait => '1 ms');
SHOW lock_timeout;
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
SELECT idem_once('2p:other');
COMMIT;
RESET lock_timeout;
COMMIT PREPARED 'regress_idem_1';
SELECT twophase_work('2p:a');
SELECT status, result FROM idem_claim('2p:a');
SELECT * FROM twophase_effect;

-- Rolled back: the next one is the claimer
BEGIN;
SELECT twophase_work('2p:b');
PREPARE TRANSACTION 'regress_idem_1';
SELECT twophase_work('2p:b');
ROLLBACK PREPARED 'regress_idem_1';
SELECT twophase_work('2p:b');
SELECT count(*) FROM twophase_effect WHERE key = '2p:b';

-- A claim that is not finished cannot be prepared
BEGIN;
SELECT claimed FROM idem_claim('2p:c');
PREPARE TRANSACTION 'regress_idem_1';
SELECT count(*) FROM pg_prepared_xacts WHERE gid LIKE 'regress_idem%';
BEGIN;
SELECT claimed FROM idem_claim('2p:c');
SELECT idem_release('2p:c');
PREPARE TRANSACTION 'regress_idem_1';
-- ... one that was released can; its key stays locked with it
SELECT status FROM idem_try_claim('2p:c');
COMMIT PREPARED 'regress_idem_1';
SELECT twophase_work('2p:c');

-- Savepoints inside
BEGIN;
SAVEPOINT s1;
SELECT twophase_work('2p:d');
RELEASE s1;
SAVEPOINT s2;
SELECT twophase_work('2p:e');
ROLLBACK TO s2;
SAVEPOINT s3;
SELECT claimed FROM idem_claim('2p:f');
RELEASE s3;
SELECT idem_complete('2p:f');
PREPARE TRANSACTION 'regress_idem_1';
SELECT k, twophase_work(k) FROM unnest('{2p:d,2p:e,2p:f}'::text[]) AS k;
COMMIT PREPARED 'regress_idem_1';
SELECT k, twophase_work(k) FROM unnest('{2p:d,2p:e,2p:f}'::text[]) AS k;

-- Two at once, in whatever order they end; and a session goes on in between
BEGIN;
SELECT twophase_work('2p:g');
PREPARE TRANSACTION 'regress_idem_1';
BEGIN;
SELECT twophase_work('2p:h');
SELECT twophase_work('2p:g');
PREPARE TRANSACTION 'regress_idem_2';
SELECT twophase_work('2p:i');
COMMIT PREPARED 'regress_idem_2';
SELECT k, twophase_work(k) FROM unnest('{2p:g,2p:h,2p:i}'::text[]) AS k;
ROLLBACK PREPARED 'regress_idem_1';
SELECT k, twophase_work(k) FROM unnest('{2p:g,2p:h,2p:i}'::text[]) AS k;

-- Forgotten by a prepared transaction: still there until it commits
BEGIN;
SELECT idem_forget('2p:a');
PREPARE TRANSACTION 'regress_idem_1';
SELECT status FROM idem_try_claim('2p:a');
SELECT count(*) FROM idem_lookup('2p:a');
ROLLBACK PREPARED 'regress_idem_1';
SELECT twophase_work('2p:a');

-- Claims made good early are uncommitted rows that others wait for
BEGIN;
SELECT count(*) FROM generate_series(1, 300) AS i, LATERAL (SELECT * FROM idem_claim('2p:many:' || i)) AS c WHERE claimed;
SELECT count(idem_complete('2p:many:' || i, i)) FROM generate_series(1, 100) AS i;
SELECT count(idem_release('2p:many:' || i)) FROM generate_series(101, 200) AS i;
SELECT count(idem_complete('2p:many:' || i, i)) FROM generate_series(201, 300) AS i;
PREPARE TRANSACTION 'regress_idem_1';
SELECT status, count(*) FROM generate_series(1, 300) AS i, LATERAL (SELECT * FROM idem_try_claim('2p:many:' || i)) AS c GROUP BY 1;
SELECT status, count(*) FROM idem_claim_batch((SELECT array_agg('2p:many:' || i) FROM generate_series(1, 300) AS i), wait => '1 ms') GROUP BY 1;
SELECT status FROM idem_claim('2p:many:300', wait => '1 ms');
COMMIT PREPARED 'regress_idem_1';
BEGIN;
SELECT status, count(*), count(*) FILTER (WHERE status = 'completed' AND result::text = i::text)
FROM generate_series(1, 300) AS i, LATERAL (SELECT * FROM idem_try_claim('2p:many:' || i)) AS c GROUP BY 1 ORDER BY 1;
ROLLBACK;
SELECT count(*) FROM generate_series(101, 200) AS i WHERE idem_once('2p:many:' || i);

-- Rows that a prepared transaction wrote by plain INSERT, in any generation
BEGIN;
INSERT INTO idem_completions (key, generation) VALUES ('2p:insert 0', 0), ('2p:insert 2', 2);
UPDATE idem_completions SET result = '"changed"' WHERE key = '2p:h';
DELETE FROM idem_completions WHERE key = '2p:i';
PREPARE TRANSACTION 'regress_idem_1';
SELECT k, status FROM unnest('{2p:insert 0,2p:insert 2,2p:h,2p:i}'::text[]) AS k, LATERAL (SELECT * FROM idem_try_claim(k)) AS c;
SELECT idem_forget('2p:f');
ROLLBACK PREPARED 'regress_idem_1';
SELECT k, twophase_work(k) FROM unnest('{2p:insert 0,2p:insert 2,2p:h,2p:i}'::text[]) AS k;

-- A holder of the store's lock: DDL waits, claims go on
SET lock_timeout = '1ms';
BEGIN;
SELECT twophase_work('2p:ddl');
PREPARE TRANSACTION 'regress_idem_1';
ALTER TABLE idem_completions ADD COLUMN x int;
TRUNCATE idem_completions;
DROP TABLE idem_completions_0;
SELECT twophase_work('2p:ddl 2');
COMMIT PREPARED 'regress_idem_1';
RESET lock_timeout;
SELECT twophase_work('2p:ddl');

SELECT key, count(*) FROM twophase_effect GROUP BY 1 HAVING count(*) > 1;
SELECT count(*) FROM pg_prepared_xacts WHERE gid LIKE 'regress_idem%';
DROP TABLE twophase_effect;
DROP FUNCTION twophase_work;
TRUNCATE idem_completions;
