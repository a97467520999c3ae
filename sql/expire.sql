--
-- Expiry: CALL idem_expire() does what is due, and the view idem_stores shows
-- it.  Time is made to pass by moving all that is noted into the past.
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

CREATE SCHEMA expire_test;
SET search_path = expire_test, public;

-- Bookkeeping and records are as they would be after so much time
CREATE FUNCTION pass_notes(passed regclass, by interval) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	t timestamptz[];
BEGIN
	-- autovacuum may have a snapshot from before the sealing
	WHILE EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'autovacuum worker' AND backend_start < now()) LOOP
		PERFORM pg_sleep(0.01), pg_stat_clear_snapshot();
	END LOOP;
	SELECT sealed_at INTO t FROM idem_store_state WHERE store = passed;
	FOR i IN coalesce(array_lower(t, 1), 1) .. coalesce(array_upper(t, 1), 0) LOOP
		t[i] := CASE WHEN isfinite(t[i]) THEN t[i] - by ELSE t[i] END;
	END LOOP;
	UPDATE idem_store_state SET sealed_at = t WHERE store = passed;
	UPDATE idem_store_state SET filling_since = filling_since - by WHERE store = passed AND isfinite(filling_since);
	UPDATE idem_store_state SET watermark = watermark - by WHERE store = passed AND isfinite(watermark);
END $$;
CREATE FUNCTION pass(passed regclass, by interval) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pass_notes(passed, by);
	EXECUTE format('UPDATE %s SET completed_at = completed_at - %L::interval WHERE isfinite(completed_at)', passed, by);
END $$;
CREATE VIEW states AS
	SELECT store, states, generations_expired AS expired, trouble FROM idem_stores
	WHERE store <> 'public.idem_completions'::regclass ORDER BY store::text;
CREATE FUNCTION status_of(key text, store regclass) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	outcome idem_outcome;
BEGIN
	outcome := idem_try_claim(key, store => store);
	IF outcome.claimed THEN
		PERFORM idem_release(key, store => store);
	END IF;
	RETURN outcome.status;
END $$;

-- One turn of a ring

SELECT idem_create_store('ring', '1 hour', 4);
CALL idem_expire('ring');
SELECT * FROM states;
SELECT idem_once('first', store => 'ring');
CALL idem_expire('ring');
SELECT states, retention, generations, bytes > 0 AS has_size, oldest_record <= clock_timestamp() AS has_oldest,
	last_expiry <= clock_timestamp() AS expired,
	next_expiry - last_expiry BETWEEN '19 minutes' AND '20 minutes' AS due_in_20, overdue, trouble
FROM idem_stores WHERE store = 'ring'::regclass;
SELECT pass('ring', '19 minutes');
CALL idem_expire('ring');
SELECT * FROM states;
SELECT pass('ring', '2 minutes');
SELECT overdue BETWEEN '1 minute' AND '2 minutes' AS overdue FROM idem_stores WHERE store = 'ring'::regclass;
CALL idem_expire('ring');
SELECT * FROM states;
SELECT idem_once('second', store => 'ring'), idem_once('first', store => 'ring');
SELECT key, generation FROM ring ORDER BY key;
-- ... sealed for the retention, not a second less
SELECT pass('ring', '30 minutes');
CALL idem_expire('ring');
SELECT * FROM states;
SELECT pass('ring', '29 minutes 30 seconds');
CALL idem_expire('ring');
SELECT * FROM states;
SELECT idem_once('first', store => 'ring'), idem_once('third', store => 'ring');
SELECT pass('ring', '30 seconds');
CALL idem_expire('ring');
SELECT * FROM states;
SELECT key, generation FROM ring ORDER BY key;
SELECT watermark <= now() - interval '1 hour' AND watermark > now() - interval '61 minutes' AS watermark
FROM idem_store_state WHERE store = 'ring'::regclass;
SELECT idem_once('first', store => 'ring');
-- ... and round and round; nobody lives longer than R * N / (N - 1) and the rounds
DO $$
BEGIN
	FOR turn IN 1 .. 12 LOOP
		PERFORM idem_once('turn ' || turn, store => 'ring'), pass('ring', '21 minutes');
		COMMIT;
		CALL idem_expire('ring');
		CALL idem_expire('ring');
	END LOOP;
END $$;
SELECT * FROM states;
SELECT count(*), min(now() - completed_at) < '1 hour' AS young, max(now() - completed_at) < '1 hour 45 minutes' AS bounded FROM ring;
SELECT string_agg(n || status_of('turn ' || n, 'ring'), ' ' ORDER BY n) FROM generate_series(9, 12) AS n;

-- ... of two, and of a hundred
SELECT idem_create_store('two', '1 hour', 2), idem_create_store('hundred', '99 hours', 100);
DO $$
BEGIN
	FOR turn IN 1 .. 5 LOOP
		PERFORM idem_once('turn ' || turn, store => s), pass(s, '61 minutes') FROM unnest('{two,hundred}'::regclass[]) AS s;
		COMMIT;
		CALL idem_expire();
		CALL idem_expire();
	END LOOP;
END $$;
SELECT store, states[:7], expired, trouble FROM states;
SELECT key, generation FROM two ORDER BY key;
SELECT key, generation FROM hundred ORDER BY key;
DROP TABLE hundred, two;

-- What the rows say counts, whatever the notes say

SELECT idem_create_store('data', '1 hour', 3);
-- ... no autovacuum that would be in the way at times
ALTER TABLE data_0 SET (autovacuum_enabled = off);
ALTER TABLE data_1 SET (autovacuum_enabled = off);
ALTER TABLE data_2 SET (autovacuum_enabled = off);
-- ... makes generation 0 sealed, so that it could be emptied by its note
CREATE PROCEDURE seal_data() LANGUAGE plpgsql AS $$
BEGIN
	CALL idem_expire('data');
	PERFORM pass('data', '31 minutes');
	COMMIT;
	CALL idem_expire('data');
	PERFORM pass('data', '10 hours');
	COMMIT;
END $$;
CREATE PROCEDURE fresh_data() LANGUAGE plpgsql AS $$
BEGIN
	TRUNCATE data;
	UPDATE idem_store_state SET current = 0, filling_since = NULL, sealed_at = '{}', sealed_xid = '{}', sealed_file = '{}'
	WHERE store = 'data'::regclass;
END $$;
CREATE TABLE kinds (n int, key text, status text, completed_at timestamptz);
INSERT INTO kinds VALUES
	(1, 'young', 'completed', now() - interval '59 minutes'),
	(2, 'old', 'completed', now() - interval '61 minutes'),
	(3, 'unknown', 'completed', NULL),
	(4, 'future', 'completed', now() + interval '1 day'),
	(5, 'infinity', 'completed', 'infinity'),
	(6, '-infinity', 'completed', '-infinity'),
	(7, 'young skipped', 'skipped', now() - interval '59 minutes'),
	(8, 'old skipped', 'skipped', now() - interval '61 minutes'),
	(9, 'young released', 'released', now() - interval '59 minutes'),
	(10, 'old released', 'released', now() - interval '61 minutes');
\set VERBOSITY terse
DO $$
DECLARE
	kind kinds;
BEGIN
	FOR kind IN SELECT * FROM kinds ORDER BY n LOOP
		CALL fresh_data();
		INSERT INTO data (key, completed_at) VALUES ('some', '-infinity');
		COMMIT;
		CALL seal_data();
		-- copied straight into a sealed generation
		INSERT INTO data (key, status, completed_at, generation) VALUES (kind.key, kind.status, kind.completed_at, 0);
		COMMIT;
		CALL idem_expire('data');
		RAISE INFO '%: %', kind.key, (SELECT array_agg(key ORDER BY key) FROM data);
	END LOOP;
END $$;
\set VERBOSITY sqlstate
-- ... the same without its BRIN index, and with ranges it does not know
CALL fresh_data();
INSERT INTO data (key, completed_at) VALUES ('some', '-infinity');
CALL seal_data();
DROP INDEX data_0_completed_at_idx;
INSERT INTO data (key, generation, completed_at) VALUES ('young', 0, now() - interval '59 minutes');
CALL idem_expire('data');
SELECT states FROM states WHERE store = 'data'::regclass;
CREATE INDEX data_0_completed_at_idx ON data_0 USING brin (completed_at) WITH (pages_per_range = 1, autosummarize = off);
INSERT INTO data (key, generation, completed_at, result)
	SELECT 'more ' || n, 0, now() - interval '2 hours', to_json(repeat('x', 1000)) FROM generate_series(1, 1000) AS n;
INSERT INTO data (key, generation, completed_at) VALUES ('at the end', 0, now() - interval '58 minutes');
DELETE FROM data WHERE key = 'young';
SELECT pg_relation_size('data_0') / current_setting('block_size')::int > 100 AS many_ranges;
CALL idem_expire('data');
SELECT count(*) FROM data;
SELECT pass('data', '2 minutes');
CALL idem_expire('data');
SELECT count(*) FROM data;

-- Open leases outlive every retention: they are carried over as they are

CALL fresh_data();
INSERT INTO data (key, status, attempts, token, claimed_at, completed_at, lease_until, claimed_by, fingerprint, checkpoint, result)
VALUES ('running', 'leased', 3, 7, '2000-01-01 00:00:00+00', '2000-01-01 00:00:01+00', 'infinity', 'me',
		'01234567-89ab-8def-8123-456789abcdef', '{"step": "charged"}', '{"b":1.10, "a":[1,  2]}'),
	   ('over', 'leased', 1, 8, NULL, '2000-01-01 00:00:00+00', '2000-01-01 00:00:00+00', NULL, NULL, NULL, NULL),
	   ('bare', 'leased', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
	   ('done', 'completed', 1, 9, NULL, '2000-01-01 00:00:00+00', NULL, NULL, NULL, NULL, '1');
INSERT INTO data (key, status, lease_until) SELECT 'many ' || n, 'leased', 'infinity' FROM generate_series(1, 250) AS n;
CREATE TABLE before AS SELECT * FROM data;
CALL idem_expire('data');
UPDATE idem_store_state SET filling_since = filling_since - interval '31 minutes' WHERE store = 'data'::regclass;
CALL idem_expire('data');
SELECT states FROM states WHERE store = 'data'::regclass;
SELECT status, generation, count(*) FROM data GROUP BY 1, 2 ORDER BY 1, 2;
SELECT count(*) FROM (SELECT d.key, d.status, d.attempts, d.token, d.claimed_at, d.completed_at, d.lease_until, d.claimed_by, d.fingerprint, d.checkpoint, d.result::text FROM data AS d
	EXCEPT SELECT b.key, b.status, b.attempts, b.token, b.claimed_at, b.completed_at, b.lease_until, b.claimed_by, b.fingerprint, b.checkpoint, b.result::text FROM before AS b) AS x;
SELECT k, status_of(k, 'data') FROM unnest('{running,over,bare,done,many 250}'::text[]) AS k;
SELECT pass_notes('data', '10 hours');
CALL idem_expire('data');
SELECT status, generation, count(*) FROM data GROUP BY 1, 2 ORDER BY 1, 2;
-- ... one that was copied into a generation that was sealed already
CALL fresh_data();
INSERT INTO data (key, completed_at) VALUES ('some', '-infinity');
CALL seal_data();
INSERT INTO data (key, status, completed_at, generation) VALUES ('late', 'leased', '-infinity', 0);
CALL idem_expire('data');
SELECT key, status, generation FROM data ORDER BY key;
DELETE FROM data WHERE key = 'late';
CALL idem_expire('data');
SELECT count(*) FROM data;
-- ... one whose key stands twice
CALL fresh_data();
INSERT INTO data (key, status, completed_at, generation) VALUES
	('resolved', 'leased', '2000-01-01', 0), ('resolved', 'completed', '2000-01-02', 1),
	('resolved before', 'leased', '2000-01-02', 0), ('resolved before', 'completed', '2000-01-01', 1),
	('twice', 'leased', '2000-01-01', 0), ('twice', 'leased', '2000-01-02', 1),
	('twice before', 'leased', '2000-01-02', 0), ('twice before', 'leased', '2000-01-01', 1);
UPDATE idem_store_state SET current = 1, filling_since = now() WHERE store = 'data'::regclass;
CALL idem_expire('data');
SELECT states FROM states WHERE store = 'data'::regclass;
SELECT key, status, generation FROM data ORDER BY key, generation;
SELECT k, status_of(k, 'data') FROM unnest('{resolved,resolved before,twice,twice before}'::text[]) AS k;

-- The bookkeeping only advises: it is lost, wrong or restored in each state of
-- a generation; a young record there stays, and an old one goes in the end

CREATE TABLE copies AS SELECT NULL::text AS state, s AS row FROM idem_store_state AS s WITH NO DATA;
CREATE PROCEDURE bring_to(state text) LANGUAGE plpgsql AS $$
BEGIN
	CALL fresh_data();
	TRUNCATE copies;
	INSERT INTO data (key, completed_at) VALUES ('old', now() - interval '2 days');
	COMMIT;
	FOREACH state IN ARRAY CASE state WHEN 'filling' THEN '{filling}' WHEN 'full' THEN '{filling,full}'
		WHEN 'sealed' THEN '{filling,sealed}' ELSE '{filling,sealed,empty}' END::text[] LOOP
		IF state = 'full' THEN
			UPDATE idem_store_state SET current = 1, filling_since = now() WHERE store = 'data'::regclass;
		ELSE
			CALL idem_expire('data');
		END IF;
		INSERT INTO copies SELECT state, s FROM idem_store_state AS s WHERE store = 'data'::regclass;
		IF (SELECT states[1] FROM states WHERE store = 'data'::regclass) <> state THEN
			RAISE 'not %', state;
		END IF;
		IF state = 'filling' THEN
			PERFORM pass_notes('data', '31 minutes');
		ELSIF state = 'sealed' THEN
			PERFORM pass_notes('data', '61 minutes');
		END IF;
		COMMIT;
	END LOOP;
END $$;
CREATE FUNCTION restore(which text) RETURNS void LANGUAGE sql AS $$
	DELETE FROM idem_store_state WHERE store = 'data'::regclass;
	INSERT INTO idem_store_state SELECT (row).* FROM copies WHERE state = which;
$$;
CREATE TABLE damages (n serial, sql text);
INSERT INTO damages (sql) VALUES
	('DELETE FROM idem_store_state WHERE mine'),
	($$SELECT restore('filling')$$),
	($$SELECT restore('full')$$),
	($$SELECT restore('sealed')$$),
	($$SELECT restore('empty')$$),
	('UPDATE idem_store_state SET current = 0 WHERE mine'),
	('UPDATE idem_store_state SET current = 1 WHERE mine'),
	('UPDATE idem_store_state SET current = -7 WHERE mine'),
	('UPDATE idem_store_state SET current = 77 WHERE mine'),
	($$UPDATE idem_store_state SET filling_since = '-infinity' WHERE mine$$),
	($$UPDATE idem_store_state SET filling_since = '2000-01-01' WHERE mine$$),
	($$UPDATE idem_store_state SET sealed_at = '{2000-01-01,2000-01-01,2000-01-01}' WHERE mine$$),
	($$UPDATE idem_store_state SET sealed_at = '{-infinity,-infinity,-infinity}' WHERE mine$$),
	($$UPDATE idem_store_state SET sealed_at = '{}' WHERE mine$$),
	($$UPDATE idem_store_state SET sealed_xid = '{}' WHERE mine$$),
	($$UPDATE idem_store_state SET watermark = 'infinity', generations_expired = -1, last_step_at = 'infinity' WHERE mine$$),
	($$UPDATE idem_store_state SET origin = 'another' WHERE mine$$),
	($$UPDATE idem_store_state SET store_name = 'another' WHERE mine$$),
	($$UPDATE idem_store_state SET retention = NULL WHERE mine$$),
	($$INSERT INTO idem_store_state (store, schema_name, store_name, origin, retention, current, sealed_at, sealed_xid, sealed_file)
		SELECT store, schema_name, store_name, 'another', 1, 1, '{2000-01-01,2000-01-01,2000-01-01}', '{1,1,1}',
			ARRAY[pg_relation_filenode('data_0'), pg_relation_filenode('data_1'), pg_relation_filenode('data_2')]::oid[]
		FROM idem_store_state WHERE mine$$);
CREATE PROCEDURE suffer(damage text) LANGUAGE plpgsql AS $$
DECLARE
	state text;
	lost text[] = '{}';
	stuck text[] = '{}';
	retention bigint;
BEGIN
	FOREACH state IN ARRAY '{filling,full,sealed,empty}'::text[] LOOP
		DELETE FROM idem_store_state WHERE schema_name = 'expire_test' AND store_name IN ('data', 'another');
		PERFORM idem_set_retention('1 hour', 'data');
		COMMIT;
		CALL bring_to(state);
		INSERT INTO data (key, completed_at, generation) VALUES ('young', now() - interval '20 minutes', 0);
		EXECUTE replace(damage, 'mine', 'store = ''data''::regclass');
		COMMIT;
		CALL idem_expire('data');
		CALL idem_expire('data');
		IF idem_once('young', store => 'data') THEN
			lost := lost || state;
		END IF;
		IF NOT EXISTS (SELECT FROM idem_stores AS s WHERE s.store = 'data'::regclass AND s.retention IS NOT NULL) THEN
			PERFORM idem_set_retention('1 hour', 'data');
		END IF;
		COMMIT;
		FOR i IN 1 .. 3 LOOP
			CALL idem_expire('data');
			PERFORM pass('data', '61 minutes');
			PERFORM idem_once('another ' || i, store => 'data');
			COMMIT;
			CALL idem_expire('data');
		END LOOP;
		IF EXISTS (SELECT FROM data WHERE key IN ('old', 'young')) THEN
			stuck := stuck || state;
		END IF;
	END LOOP;
	IF lost <> '{}' OR stuck <> '{}' THEN
		RAISE INFO '%: lost in %, stuck in %', damage, lost, stuck;
	END IF;
END $$;
\set VERBOSITY terse
CALL suffer('SELECT');
DO $$
DECLARE
	damage text;
BEGIN
	FOR damage IN SELECT sql FROM damages ORDER BY n LOOP
		CALL suffer(damage);
	END LOOP;
END $$;
\set VERBOSITY sqlstate

-- Retention counts for what is there already, raised or lowered in any state

CREATE PROCEDURE change(state text, first interval, second interval) LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_set_retention('1 hour', 'data');
	COMMIT;
	CALL bring_to(state);
	INSERT INTO data (key, completed_at, generation) VALUES ('90 minutes', now() - interval '90 minutes', 0);
	PERFORM pass_notes('data', '90 minutes');
	PERFORM idem_set_retention(first, 'data');
	PERFORM idem_set_retention(second, 'data');
	COMMIT;
	CALL idem_expire('data');
	RAISE INFO '%, % then %: %', state, first, second,
		CASE WHEN EXISTS (SELECT FROM idem_lookup('90 minutes', 'data')) THEN 'kept' ELSE 'expired' END;
END $$;
\set VERBOSITY terse
DO $$
DECLARE
	state text;
BEGIN
	FOREACH state IN ARRAY '{filling,full,sealed,empty}'::text[] LOOP
		CALL change(state, '1 hour', '1 hour');
		CALL change(state, '1 hour', '2 hours');
		CALL change(state, '2 hours', '1 hour');
	END LOOP;
END $$;
\set VERBOSITY sqlstate

-- first_sent: what may have been known and may have expired is too late

SELECT idem_set_retention('1 hour', 'data');
CALL bring_to('filling');
INSERT INTO data (key, completed_at) VALUES ('old but there', now() - interval '3 days');
CREATE FUNCTION sent(ago interval, key text DEFAULT 'unknown') RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	outcome idem_outcome;
BEGIN
	outcome := idem_try_claim(key, first_sent => now() - ago, store => 'data');
	IF outcome.claimed THEN
		PERFORM idem_release(key, store => 'data');
	END IF;
	RETURN outcome.status;
END $$;
SELECT sent('0'), sent('-1 day'), sent('59 minutes'), sent('61 minutes'), sent('61 minutes', 'old but there'), sent('4 days', 'old but there');
SELECT status FROM idem_claim('unknown', first_sent => now() - interval '61 minutes', store => 'data');
SELECT status FROM idem_claim('unknown', first_sent => '-infinity', store => 'data');
SELECT status FROM idem_claim('old but there', first_sent => '-infinity', store => 'data');
CREATE FUNCTION handler() RETURNS jsonb LANGUAGE sql AS $$SELECT '"ran"'::jsonb$$;
SELECT status FROM idem_run('unknown', 'handler', first_sent => now() - interval '61 minutes', store => 'data');
-- ... a raised retention knows no more than before, once something has gone
SELECT idem_set_retention('10 days', 'data');
SELECT sent('61 minutes'), sent('9 days'), sent('11 days');
SELECT idem_set_retention('1 hour', 'data');
CALL bring_to('empty');
SELECT idem_set_retention('10 days', 'data');
SELECT sent('59 minutes'), sent('61 minutes'), sent('9 days');
SELECT idem_set_retention('30 minutes', 'data');
SELECT sent('29 minutes'), sent('31 minutes');
-- ... the watermark never goes back
SELECT watermark AS before FROM idem_store_state WHERE store = 'data'::regclass \gset
SELECT idem_set_retention('5 hours', 'data');
INSERT INTO data (key, completed_at) VALUES ('very old', now() - interval '10 days');
CALL idem_expire('data');
SELECT pass_notes('data', '3 hours');
CALL idem_expire('data');
SELECT pass_notes('data', '6 hours');
UPDATE idem_store_state SET watermark = :'before' WHERE store = 'data'::regclass;
CALL idem_expire('data');
SELECT states FROM states WHERE store = 'data'::regclass;
SELECT watermark = :'before' AS same FROM idem_store_state WHERE store = 'data'::regclass;
-- ... a store that does not expire has forgotten nothing
SELECT idem_create_store('kept');
DELETE FROM idem_store_state WHERE store = 'kept'::regclass;
SELECT status FROM idem_try_claim('k', first_sent => '-infinity', store => 'kept'), idem_release('k', store => 'kept');
SELECT retention, states, next_expiry, overdue FROM idem_stores WHERE store = 'kept'::regclass;
CALL idem_expire('kept');
SELECT count(*) FROM idem_store_state WHERE store = 'kept'::regclass;

-- Old keys: plain INSERTs land in the current generation, replay, and expire
-- by when they were done

CREATE TABLE processed_keys (id text PRIMARY KEY, response jsonb, processed_at timestamptz);
INSERT INTO processed_keys
	SELECT 'order:' || n, jsonb_build_object('n', n), now() - n * interval '10 minutes' FROM generate_series(1, 12) AS n;
SELECT idem_create_store('orders', '1 hour', 3);
SELECT idem_once('new', store => 'orders');
CALL idem_expire('orders');
SELECT pass('orders', '31 minutes');
CALL idem_expire('orders');
INSERT INTO orders (key, result, completed_at) SELECT id, response, processed_at FROM processed_keys;
SELECT generation, count(*) FROM orders GROUP BY 1 ORDER BY 1;
SELECT claimed, status, result FROM idem_claim('order:12', store => 'orders');
SELECT claimed, status, result FROM idem_claim('order:1', '{"any": "request"}', store => 'orders');
SELECT idem_once('order:2', store => 'orders');
INSERT INTO orders (key, result, completed_at) SELECT id, response, processed_at FROM processed_keys ON CONFLICT DO NOTHING;
SELECT count(*) FROM orders;
-- ... some of them are old already, but they go together with the youngest
CALL idem_expire('orders');
SELECT states FROM states WHERE store = 'orders'::regclass;
SELECT pass('orders', '31 minutes');
CALL idem_expire('orders');
SELECT states FROM states WHERE store = 'orders'::regclass;
SELECT pass('orders', '59 minutes');
CALL idem_expire('orders');
SELECT idem_once('order:12', store => 'orders');
SELECT pass('orders', '2 minutes');
CALL idem_expire('orders');
SELECT idem_once('order:12', store => 'orders'), idem_once('order:1', store => 'orders');
-- ... a first retention: longer than the longest time a retry has come after
CREATE TABLE attempts (id text, attempted_at timestamptz);
INSERT INTO attempts SELECT id, processed_at + n * interval '7 hours' FROM processed_keys, generate_series(0, 3) AS n;
SELECT idem_set_retention(2 * max(horizon), 'orders')
FROM (SELECT max(attempted_at) - min(attempted_at) AS horizon FROM attempts GROUP BY id) AS a;
SELECT retention FROM idem_stores WHERE store = 'orders'::regclass;

-- CALL idem_expire()

SELECT proname, pg_get_function_arguments(oid), prokind, prosecdef FROM pg_proc WHERE proname = 'idem_expire';
CALL idem_expire(NULL);
CALL idem_expire('no_such_store');
CALL idem_expire(0);
CALL idem_expire('kinds');
CALL idem_expire('data_0');
CALL idem_expire('states');
CALL idem_expire('pg_class');
SELECT count(*) FROM idem_store_state WHERE store_name IN ('kinds', 'data_0', 'states', 'pg_class');
BEGIN;
CALL idem_expire('data');
ROLLBACK;
SET default_transaction_read_only = on;
CALL idem_expire('data');
SET default_transaction_read_only = off;
CREATE FUNCTION from_function() RETURNS void LANGUAGE plpgsql AS 'BEGIN CALL idem_expire(''data''); END';
SELECT from_function();
-- ... leaves the session as it was
SET lock_timeout = '1h';
SET enable_seqscan = on;
CREATE TABLE settings AS SELECT name, setting, source FROM pg_settings;
CALL idem_expire();
SELECT name, n.setting, o.setting FROM pg_settings AS n JOIN settings AS o USING (name)
WHERE (n.setting, n.source) IS DISTINCT FROM (o.setting, o.source);
RESET lock_timeout;
SELECT current_user = session_user AS myself, current_schemas(false);
-- ... whatever its default of isolation
SELECT idem_set_retention('1 hour', 'data');
SET default_transaction_isolation = serializable;
CALL bring_to('filling');
CALL idem_expire('data');
SELECT states FROM states WHERE store = 'data'::regclass;
SHOW transaction_isolation;
RESET default_transaction_isolation;

-- Who may: the owner, of his own; nobody needs rights on the bookkeeping

CREATE ROLE regress_idem_owner;
CREATE ROLE regress_idem_other;
GRANT USAGE, CREATE ON SCHEMA expire_test TO regress_idem_owner, regress_idem_other;
SET ROLE regress_idem_owner;
SELECT idem_create_store('owned', '1 hour', 2);
INSERT INTO owned (key, completed_at) VALUES ('old', '-infinity');
CALL idem_expire();
CALL idem_expire('data');
RESET ROLE;
SELECT pass_notes('owned', '2 hours');
CREATE TABLE last AS SELECT store, last_step_at FROM idem_store_state;
SET ROLE regress_idem_other;
CALL idem_expire('owned');
CALL idem_expire();
SELECT states, bytes > 0 AS has_size, oldest_record FROM idem_stores WHERE store = 'owned'::regclass;
SELECT count(*) > 1 AS all_stores FROM idem_stores;
UPDATE idem_store_state SET retention = 1;
DELETE FROM idem_store_state;
SET ROLE regress_idem_owner;
CALL idem_expire();
SELECT states, oldest_record, trouble FROM idem_stores WHERE store = 'owned'::regclass;
RESET ROLE;
SELECT l.store::regclass FROM last AS l JOIN idem_store_state AS s USING (store)
WHERE l.last_step_at IS DISTINCT FROM s.last_step_at;
SELECT tableowner FROM pg_tables WHERE tablename = 'owned_0';
GRANT SELECT ON owned, owned_0, owned_1 TO regress_idem_other;
SET ROLE regress_idem_other;
SELECT states, oldest_record FROM idem_stores WHERE store = 'owned'::regclass;
RESET ROLE;

-- Trouble is said once, disturbs no other store, and is over when it is over

CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	RAISE 'no % of % for %', TG_OP, TG_TABLE_NAME, current_user;
END $$;
CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
SELECT pass_notes('owned', '2 hours');
SELECT idem_once('next', store => 'owned');
CALL idem_expire('owned');
SELECT states FROM states WHERE store = 'owned'::regclass;
CREATE TRIGGER refuse BEFORE TRUNCATE ON owned_0 EXECUTE FUNCTION refuse();
CREATE TRIGGER refuse BEFORE TRUNCATE ON owned_1 EXECUTE FUNCTION refuse();
SELECT pass('owned', '2 hours'), pass_notes('ring', '2 hours');
\set VERBOSITY default
CALL idem_expire();
CALL idem_expire();
SELECT states, trouble FROM idem_stores WHERE store = 'owned'::regclass;
SELECT trouble FROM idem_stores WHERE store = 'ring'::regclass;
DROP TRIGGER refuse ON owned_0;
DROP TRIGGER refuse ON owned_1;
CALL idem_expire();
SELECT states, trouble FROM idem_stores WHERE store = 'owned'::regclass;
-- ... a lease that a trigger does not let move stays where it is
INSERT INTO owned (key, status) VALUES ('lease', 'leased');
SELECT generation AS old, 1 - generation AS new FROM owned WHERE key = 'lease' \gset
CREATE TRIGGER swallow BEFORE INSERT ON owned_:new FOR EACH ROW EXECUTE FUNCTION swallow();
SELECT pass_notes('owned', '2 hours');
CALL idem_expire('owned');
CALL idem_expire('owned');
SELECT key, generation = :old AS stayed FROM owned WHERE key = 'lease';
SELECT trouble FROM idem_stores WHERE store = 'owned'::regclass;
DROP TRIGGER swallow ON owned_:new;
CREATE TRIGGER swallow BEFORE DELETE ON owned_:old FOR EACH ROW EXECUTE FUNCTION swallow();
CALL idem_expire('owned');
SELECT key, generation = :old AS stayed FROM owned WHERE key = 'lease';
SELECT trouble FROM idem_stores WHERE store = 'owned'::regclass;
DROP TRIGGER swallow ON owned_:old;
CALL idem_expire('owned');
SELECT key, generation = :old AS stayed FROM owned WHERE key = 'lease';
SELECT trouble FROM idem_stores WHERE store = 'owned'::regclass;
\set VERBOSITY sqlstate
-- ... row security that hides rows is no proof of their absence
TRUNCATE owned;
INSERT INTO owned (key, completed_at) VALUES ('old', now() - interval '3 hours');
CALL idem_expire('owned');
SELECT pass_notes('owned', '2 hours');
CALL idem_expire('owned');
INSERT INTO owned (key, generation) SELECT 'young', generation FROM owned;
SELECT format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY', 'owned_' || n) FROM generate_series(0, 1) AS n \gexec
SELECT pass_notes('owned', '2 hours');
CALL idem_expire('owned');
SELECT key FROM owned ORDER BY key;
SELECT trouble IS NOT NULL AS trouble FROM idem_stores WHERE store = 'owned'::regclass;
-- ... a store that is no store any more is listed, and left alone
DROP TABLE data_2;
CALL idem_expire('data');
SELECT states, trouble IS NOT NULL AS trouble FROM idem_stores WHERE store = 'data'::regclass;

-- The worker is not there in this server, or it is not running
SELECT DISTINCT worker IN ('none: idem is not in shared_preload_libraries', 'none: idem.worker is off') AS none FROM idem_stores;

SET client_min_messages = warning;
DROP SCHEMA expire_test CASCADE;
DROP ROLE regress_idem_owner, regress_idem_other;
DELETE FROM idem_store_state WHERE schema_name = 'expire_test';
RESET client_min_messages;
