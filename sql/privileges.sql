--
-- Privileges, row security, and where claims are refused
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

CREATE ROLE regress_idem_owner;
CREATE ROLE regress_idem_user;
CREATE ROLE regress_idem_none;
CREATE SCHEMA privileges_test;
GRANT CREATE, USAGE ON SCHEMA privileges_test TO regress_idem_owner;
GRANT USAGE ON SCHEMA privileges_test TO regress_idem_user, regress_idem_none;

-- Nobody but its owner has any privilege on a new store, whatever
-- ALTER DEFAULT PRIVILEGES says
ALTER DEFAULT PRIVILEGES FOR ROLE regress_idem_owner GRANT ALL ON TABLES TO regress_idem_user;
ALTER DEFAULT PRIVILEGES FOR ROLE regress_idem_owner GRANT SELECT ON TABLES TO PUBLIC;
ALTER DEFAULT PRIVILEGES FOR ROLE regress_idem_owner IN SCHEMA privileges_test
GRANT INSERT ON TABLES TO regress_idem_none WITH GRANT OPTION;
SET ROLE regress_idem_owner;
SELECT idem_create_store('privileges_test.store');
CREATE TABLE privileges_test.ordinary (x int);
RESET ROLE;
SELECT relname, relowner::regrole, a.grantee::regrole, a.privilege_type
FROM pg_class AS c, aclexplode(coalesce(relacl, acldefault('r', relowner))) AS a
WHERE relnamespace = 'privileges_test'::regnamespace AND relkind IN ('r', 'p')
	  AND relname LIKE 'store%' AND a.grantee <> relowner;
SELECT count(*) > 0 AS granted FROM pg_class AS c, aclexplode(relacl) AS a
WHERE c.oid = 'privileges_test.ordinary'::regclass AND a.grantee <> relowner;
ALTER DEFAULT PRIVILEGES FOR ROLE regress_idem_owner REVOKE ALL ON TABLES FROM regress_idem_user, PUBLIC;
ALTER DEFAULT PRIVILEGES FOR ROLE regress_idem_owner IN SCHEMA privileges_test
REVOKE ALL ON TABLES FROM regress_idem_none;

-- ... so it is with the default store, made by CREATE EXTENSION
BEGIN;
SET client_min_messages = warning;
DROP EXTENSION idem CASCADE;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO regress_idem_user;
ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC;
CREATE SCHEMA privileges_ext;
CREATE EXTENSION idem SCHEMA privileges_ext;
RESET client_min_messages;
SELECT c.relname, a.grantee::regrole, a.privilege_type
FROM pg_class AS c, aclexplode(relacl) AS a
WHERE c.relnamespace = 'privileges_ext'::regnamespace AND relkind IN ('r', 'p', 'v', 'S')
	  AND a.grantee <> relowner ORDER BY 1, 2, 3;
ROLLBACK;

-- What each function needs on the store, and that nothing less will do
CREATE FUNCTION privileges_try(query text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE query;
	RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END $$;
CREATE VIEW privileges_calls AS SELECT * FROM (VALUES
	(1, 'claim', $$SELECT idem_release('p:1', store => 'privileges_test.store') FROM idem_claim('p:1', store => 'privileges_test.store')$$),
	(2, 'try', $$SELECT idem_release('p:2', store => 'privileges_test.store') FROM idem_try_claim('p:2', store => 'privileges_test.store')$$),
	(3, 'batch', $$SELECT idem_release('p:3', store => 'privileges_test.store') FROM idem_claim_batch('{p:3}', store => 'privileges_test.store')$$),
	(4, 'once', $$SELECT idem_once('p:4', store => 'privileges_test.store')$$),
	(5, 'run', $$SELECT idem_run('p:5', 'now', store => 'privileges_test.store')$$),
	(6, 'replay', $$SELECT idem_claim('p:done', store => 'privileges_test.store')$$),
	(7, 'replaces', $$SELECT idem_once('p:released', store => 'privileges_test.store')$$),
	(8, 'moves', $$SELECT idem_once('p:moved', store => 'privileges_test.store')$$),
	(9, 'lookup', $$SELECT idem_lookup('p:done', 'privileges_test.store')$$),
	(10, 'forget', $$SELECT idem_forget('p:forget', 'privileges_test.store')$$),
	(11, 'retention', $$SELECT idem_set_retention('1 day', 'privileges_test.store')$$)) AS v(n, name, query);
GRANT SELECT ON privileges_calls TO PUBLIC;
INSERT INTO privileges_test.store (key, status, generation)
VALUES ('p:done', 'completed', 0), ('p:released', 'released', 0), ('p:moved', 'released', 2), ('p:forget', 'completed', 0);
CREATE TABLE privileges_result (privileges text, name text, state text);
GRANT ALL ON privileges_result TO PUBLIC;
DO $do$
DECLARE
	p text;
BEGIN
	FOREACH p IN ARRAY '{"",SELECT,INSERT,"SELECT, INSERT",UPDATE,DELETE,"SELECT, INSERT, UPDATE, DELETE","TRUNCATE, REFERENCES, TRIGGER"}'::text[] LOOP
		BEGIN
			IF p <> '' THEN
				EXECUTE format('GRANT %s ON privileges_test.store TO regress_idem_user', p);
			END IF;
			SET LOCAL ROLE regress_idem_user;
			INSERT INTO privileges_result SELECT p, name, privileges_try(query) FROM privileges_calls;
			RESET ROLE;
			EXECUTE 'REVOKE ALL ON privileges_test.store FROM regress_idem_user';
			DELETE FROM privileges_test.store WHERE key LIKE 'p:_';
		END;
	END LOOP;
END $do$;
SELECT privileges,
	   string_agg(name, ' ' ORDER BY n) FILTER (WHERE state = 'ok') AS allowed,
	   string_agg(DISTINCT state, ' ') FILTER (WHERE state <> 'ok') AS refused_with
FROM privileges_result JOIN privileges_calls USING (name) GROUP BY 1 ORDER BY 1;
-- ... on the partitions they count for nothing; on columns neither
TRUNCATE privileges_result;
GRANT ALL ON privileges_test.store_0, privileges_test.store_1, privileges_test.store_2, privileges_test.store_3
TO regress_idem_user;
GRANT SELECT (key, status, attempts, token, claimed_at, completed_at, lease_until, claimed_by, fingerprint, checkpoint, result, generation),
	  INSERT (key, status, attempts, token, claimed_at, completed_at, lease_until, claimed_by, fingerprint, checkpoint, result, generation)
ON privileges_test.store TO regress_idem_user;
SET ROLE regress_idem_user;
SELECT n, name, privileges_try(query) FROM privileges_calls ORDER BY n;
RESET ROLE;
REVOKE ALL ON privileges_test.store, privileges_test.store_0, privileges_test.store_1, privileges_test.store_2, privileges_test.store_3
FROM regress_idem_user;
-- ... nor does it help to own a partition
ALTER TABLE privileges_test.store_0 OWNER TO regress_idem_user;
SET ROLE regress_idem_user;
SELECT n, name, privileges_try(query) FROM privileges_calls ORDER BY n;
RESET ROLE;
ALTER TABLE privileges_test.store_0 OWNER TO regress_idem_owner;
-- ... the owner has all; what is granted to PUBLIC counts
SET ROLE regress_idem_owner;
BEGIN;
SELECT n, name, privileges_try(query) FROM privileges_calls ORDER BY n;
ROLLBACK;
GRANT SELECT, INSERT ON privileges_test.store TO PUBLIC;
SET ROLE regress_idem_none;
BEGIN;
SELECT n, name, privileges_try(query) FROM privileges_calls ORDER BY n;
ROLLBACK;
RESET ROLE;
REVOKE ALL ON privileges_test.store FROM PUBLIC;

-- The message says what is missing
\set VERBOSITY default
SET ROLE regress_idem_user;
SELECT idem_once('p:x', store => 'privileges_test.store');
SELECT idem_lookup('p:x', store => 'privileges_test.store');
SELECT idem_forget('p:x', store => 'privileges_test.store');
SELECT idem_set_retention('1 day', 'privileges_test.store');
SELECT idem_once('p:x');
RESET ROLE;
\set VERBOSITY sqlstate

-- A privilege that was taken away in between is missed
GRANT SELECT, INSERT ON privileges_test.store TO regress_idem_user;
BEGIN;
SET LOCAL ROLE regress_idem_user;
SELECT status FROM idem_claim('p:revoked', store => 'privileges_test.store');
RESET ROLE;
REVOKE INSERT ON privileges_test.store FROM regress_idem_user;
SET LOCAL ROLE regress_idem_user;
SELECT idem_complete('p:revoked', store => 'privileges_test.store');
ROLLBACK;

-- The bookkeeping can be read by everybody and written by its owner alone
SET ROLE regress_idem_user;
SELECT count(*) FROM idem_store_state WHERE store = 'privileges_test.store'::regclass;
UPDATE idem_store_state SET current = 3;
DELETE FROM idem_store_state;
RESET ROLE;

-- Stores are made where the caller may create tables
SET ROLE regress_idem_user;
SELECT idem_create_store('privileges_test.forbidden');
SELECT idem_create_store('pg_catalog.forbidden');
SELECT idem_create_store('no_such_schema.forbidden');
RESET ROLE;
SET ROLE regress_idem_owner;
SET search_path = privileges_test;
SELECT public.idem_create_store('mine');
SELECT public.idem_once('p:mine', store => 'mine'), public.idem_once('p:mine', store => 'mine');
INSERT INTO mine (key, result) VALUES ('p:loaded', '1');
SELECT public.idem_set_retention('2 days', 'mine');
SELECT retention FROM public.idem_store_state WHERE store = 'mine'::regclass;
RESET search_path;
RESET ROLE;

-- Row security: refused where it applies to the caller, never bypassed
GRANT SELECT, INSERT, UPDATE, DELETE ON privileges_test.store TO regress_idem_user;
ALTER TABLE privileges_test.store ENABLE ROW LEVEL SECURITY;
CREATE POLICY everything ON privileges_test.store USING (true) WITH CHECK (true);
SET ROLE regress_idem_user;
SELECT n, name, privileges_try(query) FROM privileges_calls WHERE name <> 'retention' ORDER BY n;
SET row_security = off;
SELECT n, name, privileges_try(query) FROM privileges_calls WHERE name IN ('once', 'lookup', 'forget') ORDER BY n;
RESET row_security;
\set VERBOSITY default
SELECT idem_once('p:x', store => 'privileges_test.store');
\set VERBOSITY sqlstate
RESET ROLE;
-- ... not to the owner, unless it is forced
SET ROLE regress_idem_owner;
SELECT idem_once('p:rls', store => 'privileges_test.store');
ALTER TABLE privileges_test.store FORCE ROW LEVEL SECURITY;
SELECT idem_once('p:rls', store => 'privileges_test.store');
ALTER TABLE privileges_test.store NO FORCE ROW LEVEL SECURITY;
RESET ROLE;
-- ... nor to a role with BYPASSRLS
CREATE ROLE regress_idem_bypass BYPASSRLS;
GRANT USAGE ON SCHEMA privileges_test TO regress_idem_bypass;
GRANT SELECT, INSERT ON privileges_test.store TO regress_idem_bypass;
SET ROLE regress_idem_bypass;
SELECT idem_once('p:rls', store => 'privileges_test.store');
RESET ROLE;
-- ... and it is noticed when it comes between
BEGIN;
ALTER TABLE privileges_test.store DISABLE ROW LEVEL SECURITY;
SET LOCAL ROLE regress_idem_user;
SELECT status FROM idem_claim('p:between', store => 'privileges_test.store');
RESET ROLE;
ALTER TABLE privileges_test.store ENABLE ROW LEVEL SECURITY;
SET LOCAL ROLE regress_idem_user;
SELECT idem_complete('p:between', store => 'privileges_test.store');
ROLLBACK;

-- A SECURITY DEFINER handler is the way in
SET ROLE regress_idem_owner;
CREATE FUNCTION privileges_test.way_in(k text) RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
DECLARE c public.idem_outcome;
BEGIN
	c := public.idem_claim(k, store => 'privileges_test.store');
	IF c.claimed THEN
		RETURN public.idem_complete(k, '"by the owner"', store => 'privileges_test.store');
	END IF;
	RETURN c.status;
END $$;
RESET ROLE;
REVOKE ALL ON privileges_test.store FROM regress_idem_user, regress_idem_bypass;
SET ROLE regress_idem_user;
SELECT privileges_test.way_in('p:way_in'), privileges_test.way_in('p:way_in');
SELECT idem_lookup('p:way_in', 'privileges_test.store');
RESET ROLE;
-- ... a claim it leaves open is completed with rights on the store, too
SET ROLE regress_idem_owner;
CREATE FUNCTION privileges_test.claim_only(k text) RETURNS text LANGUAGE sql SECURITY DEFINER
AS $$ SELECT status FROM public.idem_claim(k, store => 'privileges_test.store') $$;
RESET ROLE;
SET ROLE regress_idem_user;
BEGIN;
SELECT privileges_test.claim_only('p:open');
SELECT idem_complete('p:open', store => 'privileges_test.store');
ROLLBACK;
RESET ROLE;
ALTER TABLE privileges_test.store DISABLE ROW LEVEL SECURITY;

-- Security-restricted operations: refused, whoever runs them
CREATE FUNCTION privileges_test.sneaky(k text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	RETURN k || public.idem_once('p:sneaky:' || k);
END $$;
CREATE TABLE privileges_test.victim (k text);
INSERT INTO privileges_test.victim VALUES ('a');
CREATE INDEX ON privileges_test.victim (privileges_test.sneaky(k));
TRUNCATE privileges_test.victim;
CREATE INDEX victim_idx ON privileges_test.victim (privileges_test.sneaky(k));
INSERT INTO privileges_test.victim VALUES ('b');
REINDEX TABLE privileges_test.victim;
ANALYZE privileges_test.victim;
VACUUM (ANALYZE) privileges_test.victim;
CREATE MATERIALIZED VIEW privileges_test.matview AS SELECT privileges_test.sneaky('c');
CREATE MATERIALIZED VIEW privileges_test.matview AS SELECT privileges_test.sneaky('c') WITH NO DATA;
REFRESH MATERIALIZED VIEW privileges_test.matview;
-- ... each function, and in each of them nothing was done
CREATE FUNCTION privileges_test.any_call(f text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
	EXECUTE 'SELECT public.' || f;
	RETURN 'done';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END $$;
SET client_min_messages = error;
DROP MATERIALIZED VIEW privileges_test.matview;
CREATE MATERIALIZED VIEW privileges_test.matview AS
SELECT f, privileges_test.any_call(f) AS state FROM unnest(ARRAY['idem_claim(''k'')', 'idem_try_claim(''k'')',
	'idem_once(''k'')', 'idem_complete(''k'')', 'idem_complete(''k'', 1)', 'idem_release(''k'')', 'idem_forget(''k'')',
	'idem_run(''k'', ''pg_catalog.now'')', 'idem_claim_batch(''{k}'')', 'idem_create_store(''privileges_test.x'')',
	'idem_set_retention(''1 day'', ''public.idem_completions'')', 'idem_lookup(''k'')']) AS f;
RESET client_min_messages;
SELECT * FROM privileges_test.matview;
SELECT key FROM idem_completions;
\set VERBOSITY default
CREATE MATERIALIZED VIEW privileges_test.matview2 AS SELECT public.idem_once('p:message');
\set VERBOSITY sqlstate

-- EXECUTE on the functions can be taken away as from any
REVOKE EXECUTE ON FUNCTION idem_forget(text, regclass) FROM PUBLIC;
SET ROLE regress_idem_user;
SELECT idem_forget('p:x', 'privileges_test.store');
RESET ROLE;
GRANT EXECUTE ON FUNCTION idem_forget(text, regclass) TO PUBLIC;

SET client_min_messages = error;
DROP SCHEMA privileges_test CASCADE;
DROP TABLE privileges_result;
DROP VIEW privileges_calls;
DROP FUNCTION privileges_try;
DROP OWNED BY regress_idem_owner, regress_idem_user, regress_idem_none, regress_idem_bypass;
DROP ROLE regress_idem_owner, regress_idem_user, regress_idem_none, regress_idem_bypass;
TRUNCATE idem_completions;
