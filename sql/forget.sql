--
-- idem_forget(): delete the record of a key, so that it may run again
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

SELECT pg_get_function_identity_arguments(oid), prorettype::regtype,
	   provolatile, proisstrict, proparallel
FROM pg_proc WHERE proname = 'idem_forget';

SELECT idem_forget('forget:none');
SELECT idem_once('forget:a');
SELECT idem_forget('forget:a');
SELECT idem_forget('forget:a');
SELECT idem_once('forget:a', '{"another": "request"}');
SELECT count(*) FROM idem_completions;

-- In one transaction, and undone by its rollback
BEGIN;
SELECT idem_forget('forget:a'), idem_forget('forget:a');
SELECT count(*) FROM idem_lookup('forget:a');
SELECT claimed FROM idem_claim('forget:a');
SELECT idem_complete('forget:a', '"again"');
SELECT idem_forget('forget:a');
SELECT idem_once('forget:a');
SELECT idem_forget('forget:a');
ROLLBACK;
SELECT count(*) FROM idem_lookup('forget:a');
BEGIN;
SELECT idem_forget('forget:a');
SELECT claimed FROM idem_claim('forget:a');
SELECT idem_complete('forget:a', '"again"');
COMMIT;
SELECT claimed, result FROM idem_claim('forget:a');

-- No lock of a key is left: the row whose deletion is not committed stands for it
BEGIN;
SELECT idem_forget('forget:none');
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
SELECT idem_forget('forget:a');
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
ROLLBACK;

-- A key that this transaction holds uncompleted is an error
BEGIN;
SELECT claimed FROM idem_claim('forget:held');
SAVEPOINT s;
SELECT idem_forget('forget:held');
ROLLBACK TO s;
SELECT status FROM idem_claim('forget:held');
SELECT idem_release('forget:held');
SELECT idem_forget('forget:held');
COMMIT;

-- Savepoints: forgotten, and known again
BEGIN;
SELECT idem_once('forget:s');
SAVEPOINT s;
SELECT idem_forget('forget:s');
SELECT claimed FROM idem_try_claim('forget:s');
ROLLBACK TO s;
SELECT status FROM idem_try_claim('forget:s');
SAVEPOINT s2;
SELECT idem_forget('forget:s');
RELEASE s2;
SELECT claimed FROM idem_try_claim('forget:s');
SELECT idem_release('forget:s');
COMMIT;
SELECT count(*) FROM idem_lookup('forget:s');

-- Wherever it is, whatever its status, however often it stands
INSERT INTO idem_completions (key, status, generation)
VALUES ('forget:g1', 'completed', 1), ('forget:g2', 'leased', 2),
	   ('forget:g3', 'skipped', 3), ('forget:r', 'released', 0),
	   ('forget:all', 'completed', 0), ('forget:all', 'completed', 1),
	   ('forget:all', 'leased', 2), ('forget:all', 'released', 3);
SELECT k, idem_forget(k), idem_forget(k), idem_once(k)
FROM unnest('{forget:g1,forget:g2,forget:g3,forget:r,forget:all}'::text[]) AS k;
SELECT key, status, generation FROM idem_completions
WHERE key LIKE 'forget:g%' OR key IN ('forget:r', 'forget:all') ORDER BY 1, 2;

-- Only in the store that is named
SELECT idem_create_store('forget_other');
SELECT idem_once('forget:a', store => 'forget_other');
SELECT idem_forget('forget:a', 'forget_other');
SELECT status FROM idem_claim('forget:a');

-- In the statement that also claims
BEGIN;
SELECT idem_once('forget:flip'), idem_forget('forget:flip'),
	   idem_once('forget:flip'), idem_forget('forget:flip'),
	   idem_once('forget:flip');
COMMIT;
SELECT count(*) FROM idem_completions WHERE key = 'forget:flip';

-- All that match
SELECT count(*) FILTER (WHERE idem_once('forget:many:' || i)) FROM generate_series(1, 200) AS i;
SELECT count(*) FILTER (WHERE idem_forget('forget:many:' || i)) FROM generate_series(1, 200) AS i;
SELECT count(*) FROM idem_completions WHERE key LIKE 'forget:many:%';
SELECT count(*) FILTER (WHERE idem_once('forget:many:' || i)) FROM generate_series(1, 200) AS i;
-- ... with the rows coming from the store itself
SELECT count(*) FILTER (WHERE idem_forget(key)) FROM idem_completions WHERE key LIKE 'forget:many:%';

-- NULL, bad key, read only
SELECT idem_forget(NULL);
SELECT idem_forget('');
SELECT idem_forget('forget:a', NULL);
BEGIN READ ONLY;
SELECT idem_forget('forget:a');
ROLLBACK;

-- Triggers on DELETE are honoured: one that keeps the row is an error
CREATE FUNCTION forget_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF OLD.key = 'forget:kept' THEN
		RETURN NULL;
	END IF;
	RETURN OLD;
END $$;
CREATE TRIGGER forget_keep BEFORE DELETE ON forget_other
FOR EACH ROW EXECUTE FUNCTION forget_keep();
SELECT idem_once('forget:kept', store => 'forget_other');
SELECT idem_once('forget:gone', store => 'forget_other');
SELECT idem_forget('forget:kept', 'forget_other');
SELECT idem_forget('forget:gone', 'forget_other');
SELECT key FROM forget_other;
CREATE TABLE forget_log (key text);
CREATE FUNCTION forget_log() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO forget_log VALUES (OLD.key);
	RETURN NULL;
END $$;
CREATE TRIGGER forget_log AFTER DELETE ON forget_other
FOR EACH ROW EXECUTE FUNCTION forget_log();
DROP TRIGGER forget_keep ON forget_other;
SELECT idem_forget('forget:kept', 'forget_other');
SELECT * FROM forget_log;

SET client_min_messages = error;
DROP TABLE forget_other, forget_log;
DROP FUNCTION forget_keep, forget_log;
TRUNCATE idem_completions;
