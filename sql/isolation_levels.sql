--
-- Isolation levels, as far as one session can see: own rows are never a
-- conflict, whatever snapshot is older than them
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

CREATE TABLE isolation_effect (key text, level text);
CREATE FUNCTION isolation_work(k text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE c idem_outcome;
BEGIN
	c := idem_claim(k);
	IF c.claimed THEN
		INSERT INTO isolation_effect VALUES (k, current_setting('transaction_isolation'));
		PERFORM idem_complete(k, to_json(current_setting('transaction_isolation')));
		RETURN 'did';
	END IF;
	RETURN c.status || ' ' || c.result::text;
END $$;
INSERT INTO idem_completions (key, status, generation)
SELECT 'i:released:' || g, 'released', g FROM generate_series(0, 3) AS g;

-- The same work at each level: everything is found again, also what this
-- transaction did after its snapshot was taken
\set level 'READ UNCOMMITTED'
BEGIN ISOLATION LEVEL :level;
SELECT count(*) FROM isolation_effect;
SELECT isolation_work('i:1'), isolation_work('i:1');
SELECT isolation_work('i:1');
ROLLBACK;
\set level 'READ COMMITTED'
BEGIN ISOLATION LEVEL :level;
SELECT count(*) FROM isolation_effect;
SELECT isolation_work('i:1'), isolation_work('i:1');
SELECT isolation_work('i:1');
ROLLBACK;

BEGIN ISOLATION LEVEL REPEATABLE READ;
-- the snapshot is taken by the claim itself
SELECT isolation_work('i:2'), isolation_work('i:2');
SELECT isolation_work('i:2');
SELECT status, result FROM idem_lookup('i:2');
-- forget and do again, in one statement and in two
SELECT idem_forget('i:2'), isolation_work('i:2'), idem_forget('i:2');
SELECT isolation_work('i:2');
SELECT count(*) FROM idem_lookup('i:2');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
-- the snapshot is older than the claim
SELECT count(*) FROM isolation_effect;
SELECT isolation_work('i:2'), isolation_work('i:3');
SELECT isolation_work('i:3'), isolation_work('i:2');
SELECT status, result FROM idem_lookup('i:3');
SELECT idem_forget('i:2'), isolation_work('i:2');
COMMIT;
SELECT * FROM isolation_effect ORDER BY 1, 2;

-- Records that are replaced: in place, moved
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT g, isolation_work('i:released:' || g) FROM generate_series(0, 3) AS g;
SELECT g, isolation_work('i:released:' || g) FROM generate_series(0, 3) AS g;
SELECT key, status, generation FROM idem_completions WHERE key LIKE 'i:released:%' ORDER BY 1;
ROLLBACK;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT count(*) FROM isolation_effect;
SELECT g, isolation_work('i:released:' || g) FROM generate_series(0, 3) AS g;
SELECT g, isolation_work('i:released:' || g) FROM generate_series(0, 3) AS g;
SELECT g, idem_forget('i:released:' || g), isolation_work('i:released:' || g) FROM generate_series(0, 3) AS g;
COMMIT;
SELECT key, status, generation, result FROM idem_completions WHERE key LIKE 'i:released:%' ORDER BY 1;

-- Savepoints: rows that came and went with them
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM isolation_effect;
SAVEPOINT s;
SELECT isolation_work('i:s');
ROLLBACK TO s;
SELECT isolation_work('i:s');
SAVEPOINT s2;
SELECT idem_forget('i:s');
SELECT isolation_work('i:s');
ROLLBACK TO s2;
SELECT isolation_work('i:s');
SAVEPOINT s3;
SELECT idem_forget('i:s');
RELEASE s3;
SELECT isolation_work('i:s'), isolation_work('i:s');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT isolation_work('i:s');
SAVEPOINT s;
SELECT idem_forget('i:s');
ROLLBACK TO s;
SELECT isolation_work('i:s');
SELECT idem_forget('i:s');
SELECT isolation_work('i:s');
COMMIT;
SELECT count(*) FROM isolation_effect WHERE key = 'i:s';

-- Rows by plain INSERT, UPDATE and DELETE of this transaction
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM isolation_effect;
INSERT INTO idem_completions (key, result, generation) VALUES ('i:own', '1', 2);
SELECT isolation_work('i:own');
UPDATE idem_completions SET result = '2' WHERE key = 'i:own';
SELECT isolation_work('i:own');
UPDATE idem_completions SET generation = 1 WHERE key = 'i:own';
SELECT isolation_work('i:own');
DELETE FROM idem_completions WHERE key = 'i:own';
SELECT isolation_work('i:own');
COMMIT;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT isolation_work('i:own');
UPDATE idem_completions SET result = '3' WHERE key = 'i:own';
SELECT isolation_work('i:own');
DELETE FROM idem_completions WHERE key = 'i:own';
SELECT isolation_work('i:own');
ROLLBACK;
SELECT isolation_work('i:own');
-- ... a row that only was locked
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT key FROM idem_completions WHERE key = 'i:own' FOR UPDATE;
SELECT isolation_work('i:own');
SAVEPOINT s;
SELECT key FROM idem_completions WHERE key = 'i:own' FOR NO KEY UPDATE;
UPDATE idem_completions SET result = '4' WHERE key = 'i:own';
ROLLBACK TO s;
SELECT isolation_work('i:own');
COMMIT;

-- A snapshot from before, set by another way: cursors and STABLE functions
CREATE FUNCTION isolation_stable(k text) RETURNS text LANGUAGE sql STABLE AS $$ SELECT isolation_work(k) $$;
CREATE FUNCTION isolation_read(k text) RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
	RETURN (SELECT status FROM idem_claim(k));
END $$;
BEGIN ISOLATION LEVEL REPEATABLE READ;
DECLARE c CURSOR FOR SELECT isolation_read('i:cursor') FROM generate_series(1, 2);
SELECT isolation_work('i:cursor');
FETCH c;
SELECT idem_forget('i:cursor');
SELECT isolation_work('i:cursor'), isolation_read('i:cursor');
FETCH c;
COMMIT;
BEGIN;
DECLARE c CURSOR FOR SELECT isolation_read('i:cursor 2') FROM generate_series(1, 2);
SELECT isolation_work('i:cursor 2');
FETCH c;
COMMIT;

-- idem_run() shows its handler what was done before, at each level
CREATE FUNCTION isolation_handler() RETURNS bigint LANGUAGE sql STABLE AS $$ SELECT count(*) FROM isolation_effect WHERE key = 'i:run' $$;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT isolation_work('i:run'), (idem_run('i:run 2', 'isolation_handler')).result;
SELECT claimed, result FROM idem_run('i:run 3', 'isolation_handler');
COMMIT;
SELECT claimed, result FROM idem_run('i:run 3', 'isolation_handler');

-- No predicate lock is taken on a store
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT isolation_work('i:siread'), isolation_work('i:own'), idem_forget('i:none');
SELECT count(*) FROM idem_claim_batch('{i:own,i:siread}');
SELECT count(*) FROM pg_locks WHERE mode = 'SIReadLock' AND relation IN (
	SELECT inhrelid FROM pg_inherits WHERE inhparent = 'idem_completions'::regclass
	UNION SELECT indexrelid FROM pg_index JOIN pg_inherits ON indrelid = inhrelid AND inhparent = 'idem_completions'::regclass);
COMMIT;

-- Many in one serializable transaction, made good early
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT count(*) FROM isolation_effect WHERE key LIKE 'i:many:%';
SELECT count(*) FROM generate_series(1, 300) AS i WHERE isolation_work('i:many:' || i) = 'did';
SELECT count(*) FROM generate_series(1, 300) AS i WHERE isolation_work('i:many:' || i) = 'completed "serializable"';
COMMIT;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM generate_series(1, 300) AS i WHERE isolation_work('i:many:' || i) = 'completed "serializable"';
SELECT count(*) FROM generate_series(1, 300) AS i WHERE CASE WHEN idem_forget('i:many:' || i) THEN isolation_work('i:many:' || i) = 'did' END;
COMMIT;
SELECT level, count(*) FROM isolation_effect WHERE key LIKE 'i:many:%' GROUP BY 1 ORDER BY 1;

DROP TABLE isolation_effect;
DROP FUNCTION isolation_work, isolation_stable, isolation_read, isolation_handler;
TRUNCATE idem_completions;
