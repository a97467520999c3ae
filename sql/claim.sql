--
-- idem_claim() and idem_try_claim(): what a claim is answered, by the state
-- of the key, as far as one session can see it
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

SELECT proname, proargnames, provolatile, proisstrict, proparallel
FROM pg_proc WHERE proname IN ('idem_claim', 'idem_try_claim') ORDER BY 1;

-- Claim, work, complete; then every claim is a replay
BEGIN;
SELECT * FROM idem_claim('claim:a', request => '{"amount": 4200}');
SELECT claimed, status, result FROM idem_claim('claim:a');
SELECT claimed, status, result FROM idem_try_claim('claim:a');
SELECT idem_complete('claim:a', '{"invoice_no": 17}');
SELECT claimed, status, result, completed_at IS NOT NULL AS completed
FROM idem_claim('claim:a');
SELECT claimed, status, result, completed_at IS NOT NULL AS completed
FROM idem_try_claim('claim:a');
COMMIT;
SELECT claimed, status, result, token, lease_until, checkpoint
FROM idem_claim('claim:a');
SELECT claimed, status, result, token, lease_until, checkpoint
FROM idem_try_claim('claim:a');
SELECT c.completed_at = l.completed_at AS as_stored
FROM idem_claim('claim:a') c, idem_lookup('claim:a') l;

-- A replay is a read: no row is written, no transaction id assigned
BEGIN;
SELECT status FROM idem_claim('claim:a', '{"amount": 4.2e3}');
SELECT status FROM idem_try_claim('claim:a');
SELECT pg_current_xact_id_if_assigned() IS NULL AS still_a_read;
-- ... and who only replays holds no lock of a key
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
-- A claim that is given up writes nothing either, but keeps the lock
SELECT status FROM idem_claim('claim:given_up');
SELECT idem_release('claim:given_up');
SELECT pg_current_xact_id_if_assigned() IS NULL AS still_a_read;
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
COMMIT;

-- The request decides only where both sides gave one
SELECT status FROM idem_claim('claim:a', '{ "amount" : 4200.0 }');
SELECT status FROM idem_claim('claim:a', '{"amount": 4201}');
SELECT * FROM idem_try_claim('claim:a', '{"amount": 4201}');
SELECT status FROM idem_try_claim('claim:a', 'null');
BEGIN;
SELECT status FROM idem_claim('claim:no_request');
SELECT idem_complete('claim:no_request', '1');
SELECT status FROM idem_claim('claim:no_request', '{"any": "thing"}');
COMMIT;
SELECT status FROM idem_claim('claim:no_request', '{"any": "thing"}');
-- ... also in the transaction that completed the key
BEGIN;
SELECT status FROM idem_claim('claim:b', '[1]');
-- held says nothing of the request
SELECT status FROM idem_claim('claim:b', '[2]');
SELECT idem_complete('claim:b');
SELECT status FROM idem_claim('claim:b', '[1]');
SELECT status FROM idem_try_claim('claim:b', '[2]');
SELECT status FROM idem_claim('claim:b', '[2]');
ROLLBACK;

-- Nothing was left by the transaction that rolled back
BEGIN;
SELECT claimed, status FROM idem_try_claim('claim:b', '[2]');
ROLLBACK;

-- A released key can be claimed again, in this transaction and the next
BEGIN;
SELECT claimed FROM idem_claim('claim:b');
SELECT idem_release('claim:b');
SELECT claimed, status FROM idem_claim('claim:b');
SELECT idem_release('claim:b');
COMMIT;
BEGIN;
SELECT claimed, status FROM idem_claim('claim:b');
SELECT idem_release('claim:b');
COMMIT;

-- A claim that is left unfinished fails at COMMIT, and at once in autocommit
SELECT claimed FROM idem_claim('claim:c');
SELECT claimed FROM idem_try_claim('claim:c');
BEGIN;
SELECT claimed FROM idem_claim('claim:c');
COMMIT;
BEGIN;
SELECT claimed FROM idem_claim('claim:c');
ROLLBACK;
SELECT count(*) FROM idem_lookup('claim:c');

-- ... which also undoes the work that was done under other claims
CREATE TABLE claim_effect (key text);
BEGIN;
SELECT claimed FROM idem_claim('claim:c');
INSERT INTO claim_effect VALUES ('claim:c');
SELECT idem_complete('claim:c');
SELECT claimed FROM idem_claim('claim:d');
COMMIT;
SELECT count(*) FROM claim_effect;
SELECT count(*) FROM idem_lookup('claim:c');

-- The store is the namespace of its keys
SELECT idem_create_store('claim_other');
BEGIN;
SELECT claimed, status FROM idem_claim('claim:a', store => 'claim_other');
SELECT status FROM idem_claim('claim:a', store => 'claim_other');
SELECT status, result FROM idem_claim('claim:a');
SELECT idem_complete('claim:a', '"other"', store => 'claim_other');
COMMIT;
SELECT status, result FROM idem_claim('claim:a', store => 'claim_other');
SELECT status, result FROM idem_claim('claim:a');

-- Keys are compared byte by byte
BEGIN;
SELECT left(k, 12) AS k, claimed, status
FROM (VALUES ('claim:A'), ('claim:a '), (' claim:a'), ('claim:'),
			 (U&'claim:caf\00E9'), (U&'claim:cafe\0301'),
			 (U&'claim:cafe\0301'), (repeat('x', 512))) AS v(k),
	 LATERAL (SELECT * FROM idem_claim(k)) AS c;
ROLLBACK;

-- Records that were loaded or left by another way: each status, its answer
INSERT INTO idem_completions (key, result, completed_at)
VALUES ('claim:loaded', '{"b":1.10,"a":1e2}', '2020-01-01 00:00+00');
INSERT INTO idem_completions (key, status, lease_until, token, fingerprint)
VALUES ('claim:leased', 'leased', 'infinity', 1, idem_fingerprint('[1]')),
	   ('claim:lease_over', 'leased', '2020-01-01 00:00+00', 2, idem_fingerprint('[1]')),
	   ('claim:skipped', 'skipped', NULL, 3, idem_fingerprint('[1]')),
	   ('claim:released', 'released', NULL, NULL, idem_fingerprint('[1]'));
SELECT claimed, status, result, completed_at = '2020-01-01 00:00+00' AS as_loaded
FROM idem_claim('claim:loaded', '[1]');
SELECT status FROM idem_claim('claim:leased');
SELECT claimed, status, lease_until FROM idem_try_claim('claim:leased', '[1]');
SELECT claimed, status FROM idem_try_claim('claim:leased', '[2]');
SELECT status FROM idem_claim('claim:leased', '[2]');
SELECT status FROM idem_claim('claim:lease_over');
SELECT claimed, status FROM idem_try_claim('claim:lease_over', '[1]');
SELECT claimed, status FROM idem_try_claim('claim:lease_over', '[2]');
SELECT claimed, status FROM idem_claim('claim:skipped', '[2]');
SELECT claimed, status FROM idem_try_claim('claim:skipped', '[2]');
BEGIN;
SELECT claimed, status FROM idem_claim('claim:released', '[2]');
SELECT idem_complete('claim:released', '2');
COMMIT;
SELECT status, result FROM idem_claim('claim:released', '[2]');
SELECT status, result FROM idem_claim('claim:released', '[1]');

-- A record is found in whatever generation it is, and one that stands twice
-- is answered by the final one, then by the later one
INSERT INTO idem_completions (key, result, generation, completed_at)
VALUES ('claim:gen_1', '1', 1, '2020-01-01 00:00+00'),
	   ('claim:gen_2', '2', 2, '2020-01-01 00:00+00'),
	   ('claim:gen_3', '3', 3, '2020-01-01 00:00+00'),
	   ('claim:twice', '"earlier"', 2, '2020-01-01 00:00+00'),
	   ('claim:twice', '"later"', 3, '2020-01-01 00:01+00'),
	   ('claim:twice', '"earliest"', 0, '2019-01-01 00:00+00');
INSERT INTO idem_completions (key, status, result, generation, completed_at)
VALUES ('claim:final', 'completed', '"final"', 2, '2020-01-01 00:00+00'),
	   ('claim:final', 'released', NULL, 0, '2021-01-01 00:00+00'),
	   ('claim:final', 'leased', NULL, 3, '2022-01-01 00:00+00');
SELECT k, status, result
FROM (VALUES ('claim:gen_1'), ('claim:gen_2'), ('claim:gen_3'),
			 ('claim:twice'), ('claim:final')) AS v(k),
	 LATERAL (SELECT * FROM idem_claim(k)) AS c;

-- A row of a plain INSERT counts at once in its own transaction
BEGIN;
INSERT INTO idem_completions (key, result) VALUES ('claim:own_row', '5');
SELECT claimed, status, result FROM idem_claim('claim:own_row');
ROLLBACK;
-- ... but not instead of a completion: whose work was it?
BEGIN;
SELECT claimed FROM idem_claim('claim:own_row');
INSERT INTO idem_completions (key, result) VALUES ('claim:own_row', '5');
SELECT idem_complete('claim:own_row', '6');
ROLLBACK;
BEGIN;
SELECT claimed FROM idem_claim('claim:own_row');
INSERT INTO idem_completions (key, result, generation) VALUES ('claim:own_row', '5', 3);
SELECT idem_complete('claim:own_row', '6');
ROLLBACK;

-- first_sent: older than what the store still knows is too late
BEGIN;
SELECT claimed, status FROM idem_claim('claim:sent', first_sent => now() - interval '29 days');
SELECT idem_release('claim:sent');
SELECT claimed, status FROM idem_claim('claim:sent', first_sent => 'infinity');
SELECT idem_release('claim:sent');
COMMIT;
SELECT claimed, status FROM idem_try_claim('claim:sent', first_sent => now() - interval '31 days');
SELECT claimed, status FROM idem_try_claim('claim:sent', first_sent => '-infinity');
SELECT claimed, status FROM idem_claim('claim:sent', first_sent => now() - interval '31 days');
-- ... which leaves nothing behind: no claim, no lock
BEGIN;
SELECT status FROM idem_try_claim('claim:sent', first_sent => '-infinity');
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
COMMIT;
-- ... a record that is there is answered whatever its age
SELECT claimed, status FROM idem_claim('claim:loaded', first_sent => '-infinity');
-- ... and the retention of the store decides
SELECT idem_set_retention('1 hour', 'claim_other');
SELECT status FROM idem_try_claim('claim:sent', first_sent => now() - interval '61 min',
								  store => 'claim_other');
BEGIN;
SELECT status FROM idem_try_claim('claim:sent', first_sent => now() - interval '55 min',
								  store => 'claim_other');
ROLLBACK;
SELECT idem_set_retention('36525 days', 'claim_other');
BEGIN;
SELECT status FROM idem_try_claim('claim:sent', first_sent => '1970-01-01 00:00+00',
								  store => 'claim_other');
ROLLBACK;

-- wait: any interval that is not negative; NULL is the setting
BEGIN;
SELECT claimed, status
FROM unnest('{0,1ms,1 month,100000 years,NULL}'::interval[]) WITH ORDINALITY AS w(wait, n),
	 LATERAL (SELECT * FROM idem_claim('claim:wait:' || n, wait => wait)) AS c;
ROLLBACK;
SELECT status FROM idem_claim('claim:a', wait => '-1 ms');
SELECT status FROM idem_try_claim('claim:a', wait => '-1 day');
SHOW idem.wait_timeout;
SET idem.wait_timeout = -1;
SELECT status FROM idem_claim('claim:a');
SET idem.wait_timeout = 0;
SELECT status FROM idem_claim('claim:a');
SET idem.wait_timeout = -2;
SET idem.wait_timeout = '2min';
SHOW idem.wait_timeout;
RESET idem.wait_timeout;
SET idem.no_such_setting = 1;

-- Claims can be made from anywhere that SQL can be
BEGIN;
SELECT idem_claim('claim:list'), idem_claim('claim:list');
SELECT (idem_claim('claim:star')).claimed;
SELECT idem_release(k) FROM (VALUES ('claim:list'), ('claim:star')) AS v(k);
COMMIT;
-- The traps: one call for each column, so use it in FROM
BEGIN;
SELECT (idem_claim('claim:star')).*;
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
SELECT idem_complete('claim:star');
COMMIT;

CREATE FUNCTION claim_stable(k text) RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
	RETURN (SELECT status FROM idem_claim(k));
END $$;
BEGIN;
SELECT claim_stable('claim:stable'), claim_stable('claim:stable');
SELECT idem_complete('claim:stable');
SELECT claim_stable('claim:stable');
COMMIT;

DO $$
DECLARE c idem_outcome;
BEGIN
	c := idem_claim('claim:do');
	ASSERT c.claimed AND c.status = 'claimed';
	PERFORM idem_complete('claim:do', 7);
	SELECT * INTO c FROM idem_claim('claim:do');
	ASSERT NOT c.claimed AND c.result::text = '7';
END $$;
DO $$ BEGIN PERFORM idem_claim('claim:do_unfinished'); END $$;

-- A procedure that commits in between: each transaction has its own claims
CREATE PROCEDURE claim_each(n int) LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1..n LOOP
		IF (SELECT claimed FROM idem_claim('claim:proc:' || i)) THEN
			INSERT INTO claim_effect VALUES ('claim:proc:' || i);
			PERFORM idem_complete('claim:proc:' || i, i);
		END IF;
		IF i % 3 = 0 THEN ROLLBACK; ELSE COMMIT; END IF;
	END LOOP;
END $$;
CALL claim_each(7);
CALL claim_each(4);
SELECT e.key, l.result FROM claim_effect e, idem_lookup(e.key) l ORDER BY 1;
CREATE PROCEDURE claim_and_commit() LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_claim('claim:proc:unfinished');
	COMMIT;
END $$;
CALL claim_and_commit();

-- In a trigger of the user's table: the row and its completion go together
CREATE FUNCTION claim_trigger() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF idem_once('claim:row:' || NEW.key) THEN
		RETURN NEW;
	END IF;
	RETURN NULL;
END $$;
CREATE TRIGGER claim_trigger BEFORE INSERT ON claim_effect
FOR EACH ROW EXECUTE FUNCTION claim_trigger();
TRUNCATE claim_effect;
INSERT INTO claim_effect VALUES ('x'), ('y'), ('x');
INSERT INTO claim_effect VALUES ('y'), ('z');
SELECT key, count(*) FROM claim_effect GROUP BY 1 ORDER BY 1;
DROP TRIGGER claim_trigger ON claim_effect;

-- In a trigger that is deferred to COMMIT: still before the check
CREATE CONSTRAINT TRIGGER claim_deferred AFTER INSERT ON claim_effect
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION claim_trigger();
BEGIN;
INSERT INTO claim_effect VALUES ('deferred');
SELECT count(*) FROM idem_lookup('claim:row:deferred');
COMMIT;
SELECT count(*) FROM idem_lookup('claim:row:deferred');
DROP TRIGGER claim_deferred ON claim_effect;
CREATE FUNCTION claim_trigger_unfinished() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_claim('claim:row:' || NEW.key);
	RETURN NEW;
END $$;
CREATE CONSTRAINT TRIGGER claim_deferred AFTER INSERT ON claim_effect
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION claim_trigger_unfinished();
INSERT INTO claim_effect VALUES ('deferred_unfinished');
SELECT count(*) FROM claim_effect WHERE key = 'deferred_unfinished';

-- By a holdable cursor that runs as late as COMMIT
BEGIN;
DECLARE claim_hold CURSOR WITH HOLD FOR SELECT idem_once('claim:hold');
COMMIT;
FETCH claim_hold;
CLOSE claim_hold;
SELECT status FROM idem_claim('claim:hold');
BEGIN;
DECLARE claim_hold CURSOR WITH HOLD FOR SELECT status FROM idem_claim('claim:hold_unfinished');
COMMIT;

-- Prepared statements live on through every kind of end
PREPARE claim_it AS SELECT claimed, status, result FROM idem_claim($1);
BEGIN;
EXECUTE claim_it('claim:prepared');
ROLLBACK;
BEGIN;
EXECUTE claim_it('claim:prepared');
SELECT idem_complete('claim:prepared', 'true');
COMMIT;
EXECUTE claim_it('claim:prepared');
DEALLOCATE claim_it;

-- Nobody but idem takes these locks, whatever a session does with advisory ones
BEGIN;
SELECT claimed FROM idem_claim('claim:advisory');
SELECT pg_advisory_unlock_all();
SELECT pg_advisory_unlock(classid::int, objid::int)
FROM (SELECT (classid::bigint::bit(32))::int AS classid, (objid::bigint::bit(32))::int AS objid
	  FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory') AS l;
SELECT status FROM idem_claim('claim:advisory');
SELECT idem_complete('claim:advisory');
COMMIT;

SET client_min_messages = error;
DROP TABLE claim_effect, claim_other;
DROP FUNCTION claim_stable, claim_trigger, claim_trigger_unfinished;
DROP PROCEDURE claim_each, claim_and_commit;
TRUNCATE idem_completions;
