--
-- Stores: how they are made, what makes a table a store, and what its owner
-- may do to it
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

CREATE SCHEMA stores_test;
SET search_path = stores_test, public;

-- What idem_create_store() makes
SELECT idem_create_store('plain', '7 days', 3);
SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull, c.collname,
	   pg_get_expr(d.adbin, d.adrelid) AS "default"
FROM pg_attribute AS a
LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
LEFT JOIN pg_collation AS c ON c.oid = a.attcollation AND c.collname <> 'default'
WHERE a.attrelid = 'plain'::regclass AND a.attnum > 0 ORDER BY a.attnum;
SELECT relname, relkind, relpersistence, relreplident, pg_get_expr(relpartbound, oid)
FROM pg_class WHERE relnamespace = 'stores_test'::regnamespace AND relkind IN ('r', 'p') ORDER BY 1;
SELECT indexdef FROM pg_indexes WHERE schemaname = 'stores_test' AND tablename = 'plain_2' ORDER BY indexdef;
SELECT pg_get_partkeydef('plain'::regclass), pg_get_constraintdef(oid)
FROM pg_constraint WHERE conrelid = 'plain'::regclass AND contype = 'c';
SELECT retention, current, watermark FROM idem_store_state WHERE store = 'plain'::regclass;
-- ... it has the row type of all stores
SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' ORDER BY attnum)
	 = (SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' ORDER BY attnum)
		FROM pg_attribute WHERE attrelid = 'public.idem_completion'::regclass AND attnum > 0) AS same
FROM pg_attribute WHERE attrelid = 'plain'::regclass AND attnum > 0;
SELECT count(*) FROM pg_inherits WHERE inhparent = 'idem_completions'::regclass;

-- A plain INSERT lands in the current generation; its key is checked
INSERT INTO plain (key, result) VALUES ('loaded', '{"b":1.10}');
COPY plain (key, result, completed_at) FROM stdin WITH (FORMAT csv);
copied,"{""b"":1.20}",2020-01-01 00:00:00+00
\.
SELECT key, status, attempts, result, completed_at IS NOT NULL AS completed, generation FROM plain ORDER BY key;
SELECT k, status, result FROM unnest('{loaded,copied}'::text[]) AS k, LATERAL (SELECT * FROM idem_claim(k, store => 'plain')) AS c;
INSERT INTO plain (key) VALUES ('loaded');
INSERT INTO plain (key) VALUES ('loaded') ON CONFLICT DO NOTHING;
INSERT INTO plain (key) VALUES ('');
INSERT INTO plain (key) VALUES (NULL);
INSERT INTO plain (key) VALUES (repeat('x', 513));
INSERT INTO plain (key) VALUES (E'a\nb');
INSERT INTO plain (key, status) VALUES ('bad', 'done');
INSERT INTO plain (key, status) VALUES ('bad', NULL);
INSERT INTO plain (key, generation) VALUES ('bad', 3);
INSERT INTO plain (key, generation) VALUES ('bad', -1);
INSERT INTO plain (key, generation) VALUES ('bad', NULL);
INSERT INTO plain_0 (key, generation) VALUES ('bad', 1);
SELECT count(*) FROM plain;

-- Arguments
SELECT idem_create_store('x', '1 second', 2);
SELECT idem_create_store('x100', '36525 days', 100);
SELECT count(*) FROM pg_inherits WHERE inhparent = 'x100'::regclass;
SELECT idem_once('k', store => 'x'), idem_once('k', store => 'x100'), idem_once('k', store => 'x100');
SELECT idem_create_store('y', '1 day', 101);
SELECT idem_create_store('y', '1 day', 1);
SELECT idem_create_store('y', '1 day', -1);
SELECT idem_create_store('y', '1 day', NULL);
SELECT idem_create_store('y', '0');
SELECT idem_create_store('y', '-1 day');
SELECT idem_create_store('y', '36525 days 1 second');
SELECT idem_create_store('y', '1 month');
SELECT idem_create_store('y', '1 year -12 months');
SELECT idem_create_store('y', '1 day -24 hours');
SELECT idem_create_store('y', NULL);
SELECT idem_create_store(NULL);
SELECT idem_create_store('');
SELECT idem_create_store('a..b');
SELECT idem_create_store('a.b.c.d');
SELECT idem_create_store('no_such_database.stores_test.y');
SELECT idem_create_store('no_such_schema.y');
SELECT idem_create_store('pg_temp.y');
SELECT idem_create_store('plain');
SELECT idem_create_store('plain_1');
SELECT to_regclass('y');
-- ... retention in seconds, rounded up; what is stored by name and oid
SELECT idem_create_store('stores_test.fraction', '1 day 00:00:00.000001');
SELECT idem_set_retention('1.5 seconds', 'x');
SELECT store::regclass, schema_name, store_name, retention, current FROM idem_store_state
WHERE schema_name = 'stores_test' ORDER BY store_name;
SELECT idem_set_retention('2 days', 'x');
SELECT idem_set_retention('1 day -1 hour', 'x');
SELECT count(*), min(retention) FROM idem_store_state WHERE store = 'x'::regclass;
SELECT idem_set_retention(NULL, 'x');
SELECT idem_set_retention('1 day', NULL);
SELECT idem_set_retention('1 month', 'x');
SELECT idem_set_retention('1 day', 'pg_class');
SELECT idem_set_retention('1 day', 'plain_0');
BEGIN;
SELECT idem_set_retention('9 days', 'x');
ROLLBACK;
SELECT count(*), min(retention) FROM idem_store_state WHERE store = 'x'::regclass;
-- ... a store that is renamed or moved keeps its own
ALTER TABLE x RENAME TO renamed;
ALTER TABLE x_0 RENAME TO renamed_0;
ALTER TABLE x_1 RENAME TO renamed_1;
SELECT idem_once('k', store => 'renamed');
SELECT idem_set_retention('3 days', 'renamed');
SELECT idem_create_store('x', '4 days', 2);
SELECT store::regclass, store_name, retention FROM idem_store_state
WHERE store IN ('x'::regclass, 'renamed'::regclass) ORDER BY 2;
SELECT idem_once('k', store => 'x'), idem_once('k', store => 'renamed');
-- ... the default store has its default without being noted
BEGIN;
SELECT idem_set_retention('1 day');
SELECT count(*), min(retention) FROM idem_store_state WHERE store = 'idem_completions'::regclass;
ROLLBACK;

-- Odd names
SELECT idem_create_store('"Quote""d . Name"');
SELECT idem_once('k', store => '"Quote""d . Name"'), idem_once('k', store => '"Quote""d . Name"');
CREATE SCHEMA "Stores 'Test\";
SELECT idem_create_store('"Stores ''Test\"."back\slash"');
SELECT idem_once('k', store => '"Stores ''Test\"."back\slash"'), idem_once('k', store => '"Stores ''Test\"."back\slash"');
INSERT INTO "Stores 'Test\"."back\slash" (key) VALUES ('loaded');
SET standard_conforming_strings = off;
SET escape_string_warning = off;
SELECT idem_create_store(E'"Stores ''Test\\"."2back\\slash"');
SELECT idem_once('k', store => E'"Stores ''Test\\"."2back\\slash"');
RESET standard_conforming_strings;
RESET escape_string_warning;
SELECT idem_create_store('UpperCase');
SELECT idem_create_store('  stores_test  .  spaced  ');
SELECT idem_create_store('"select"');
SELECT idem_once('k', store => '"select"');
-- ... as long as a name can be, also two that differ only at their end
SELECT idem_create_store(repeat('n', 63)) = 'stores_test.' || repeat('n', 63) AS created;
SELECT idem_create_store(repeat('n', 62) || 'm') = 'stores_test.' || repeat('n', 62) || 'm' AS created;
SELECT idem_once('k', store => repeat('n', 63)::regclass), idem_once('k', store => repeat('n', 63)::regclass);
SELECT idem_once('k', store => (repeat('n', 62) || 'm')::regclass);
SELECT idem_create_store(repeat(U&'\00e9', 31) || 'x') = 'stores_test."' || repeat(U&'\00e9', 31) || 'x"' AS created;
SELECT idem_once('k', store => quote_ident(repeat(U&'\00e9', 31) || 'x')::regclass);

-- Hostile surroundings: nothing of the caller's is called
CREATE SCHEMA stores_hostile;
CREATE FUNCTION stores_hostile.quote_ident(text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
CREATE FUNCTION stores_hostile.idem_generation(regclass) RETURNS smallint LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
CREATE FUNCTION stores_hostile.idem_check(text, text, smallint, int) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
CREATE FUNCTION stores_hostile.eq(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'hostile'; END $$;
CREATE OPERATOR stores_hostile.= (leftarg = text, rightarg = text, function = stores_hostile.eq);
CREATE DOMAIN stores_hostile.text AS int;
CREATE DOMAIN stores_hostile.regclass AS int;
CREATE TABLE stores_hostile.idem_store_state (x int);
CREATE TABLE stores_hostile.idem_completions (x int);
SET search_path = stores_hostile, pg_catalog, public;
SELECT public.idem_create_store('hostile', '2 days');
SELECT public.idem_once('k', store => 'hostile'), public.idem_once('k', store => 'hostile');
SELECT public.idem_set_retention('1 day', 'hostile');
SELECT public.idem_once('stores:default'), public.idem_once('stores:default');
INSERT INTO hostile (key) VALUES ('by hand');
SELECT public.idem_forget('k', 'hostile');
SET search_path = stores_test, public;
SELECT tableoid::regclass, key FROM stores_hostile.hostile;

-- A store by its structure alone: made by hand, without idem_create_store()
CREATE TABLE byhand (
	generation smallint NOT NULL, result json, junk int, checkpoint jsonb, fingerprint uuid, claimed_by text,
	lease_until timestamptz, completed_at timestamptz, claimed_at timestamptz, token bigint,
	attempts int, status text, key text COLLATE "C"
) PARTITION BY LIST (generation);
ALTER TABLE byhand DROP COLUMN junk;
CREATE TABLE byhand_zero PARTITION OF byhand FOR VALUES IN (0);
SELECT idem_once('k', store => 'byhand');
-- ... a partition with other attribute numbers
CREATE TABLE byhand_one (gone int, key text COLLATE "C", status text, gone2 text, attempts int, token bigint, claimed_at timestamptz,
	completed_at timestamptz, lease_until timestamptz, claimed_by text, fingerprint uuid, checkpoint jsonb, result json, generation smallint NOT NULL);
ALTER TABLE byhand_one DROP COLUMN gone, DROP COLUMN gone2;
ALTER TABLE byhand ATTACH PARTITION byhand_one FOR VALUES IN (1);
SELECT idem_once('k', store => 'byhand');
CREATE UNIQUE INDEX ON byhand_zero (key);
SELECT idem_once('k', store => 'byhand');
CREATE UNIQUE INDEX ON byhand_one (key DESC) INCLUDE (status);
SELECT idem_once('k', store => 'byhand'), idem_once('k', store => 'byhand');
BEGIN;
SELECT claimed FROM idem_claim('k2', '[1]', store => 'byhand');
SELECT idem_complete('k2', '{"b":1.10}', store => 'byhand');
COMMIT;
SELECT status, result FROM idem_claim('k2', store => 'byhand');
SELECT status FROM idem_claim('k2', '[2]', store => 'byhand');
SELECT key, status, attempts, result, generation FROM idem_lookup('k2', 'byhand');
INSERT INTO byhand_one (key, status, attempts, result, completed_at, generation)
VALUES ('in_one', 'completed', 1, '"one"', now(), 1), ('r_one', 'released', 5, NULL, now(), 1);
SELECT status, result FROM idem_claim('in_one', store => 'byhand');
SELECT idem_once('r_one', store => 'byhand'), idem_once('r_one', store => 'byhand');
SELECT key, status, attempts, generation FROM byhand ORDER BY 1;
SELECT idem_forget('in_one', 'byhand'), idem_forget('k2', 'byhand');
-- ... it expires only when that is asked for
SELECT count(*) FROM idem_store_state WHERE store = 'byhand'::regclass;
BEGIN;
SELECT status FROM idem_claim('late', first_sent => '-infinity', store => 'byhand');
ROLLBACK;
SELECT idem_set_retention('1 day', 'byhand');
SELECT status FROM idem_try_claim('late', first_sent => '-infinity', store => 'byhand');

-- Look-alikes that are refused
CREATE FUNCTION stores_try(store regclass) RETURNS text LANGUAGE plpgsql AS $$
DECLARE detail text;
BEGIN
	PERFORM idem_once('k', store => store);
	RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
	RETURN SQLSTATE || ' ' || detail;
END $$;
CREATE TABLE flat (LIKE plain INCLUDING ALL);
CREATE UNIQUE INDEX ON flat (key);
CREATE VIEW a_view AS SELECT * FROM plain;
CREATE MATERIALIZED VIEW a_matview AS SELECT * FROM plain;
CREATE SEQUENCE a_sequence;
CREATE TYPE a_type AS (key text);
CREATE TABLE by_range (LIKE plain) PARTITION BY RANGE (generation);
CREATE TABLE by_hash (LIKE plain) PARTITION BY HASH (generation);
CREATE TABLE by_key (LIKE plain) PARTITION BY LIST (key);
CREATE TABLE by_expression (LIKE plain) PARTITION BY LIST ((generation + 0));
CREATE TABLE no_partitions (LIKE plain) PARTITION BY LIST (generation);
CREATE TABLE one_partition (LIKE plain) PARTITION BY LIST (generation);
CREATE TABLE one_partition_0 PARTITION OF one_partition FOR VALUES IN (0);
CREATE UNIQUE INDEX ON one_partition_0 (key);
SELECT t, stores_try(t::regclass) FROM unnest('{flat,a_view,a_matview,a_sequence,a_type,by_range,by_hash,by_key,
	by_expression,no_partitions,one_partition,plain_0,plain_0_key_idx,pg_class,idem_store_state}'::text[]) AS t;

DROP VIEW a_view;
DROP MATERIALIZED VIEW a_matview;

-- A store from which something is missing: each is tried and undone
CREATE PROCEDURE stores_break(what text) LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE what;
	RAISE NOTICE '%', stores_try('plain');
	RAISE division_by_zero;
EXCEPTION WHEN division_by_zero THEN
	ASSERT stores_try('plain') = 'ok';
END $$;
\set VERBOSITY terse
-- every NOTICE is what a claim was answered
CALL stores_break('DROP TABLE plain_0');
CALL stores_break('DROP TABLE plain_1');
CALL stores_break('DROP TABLE plain_2');
CALL stores_break('ALTER TABLE plain DETACH PARTITION plain_0');
CALL stores_break('ALTER TABLE plain DETACH PARTITION plain_2');
CALL stores_break('DROP TABLE plain_1, plain_2');
CALL stores_break('CREATE TABLE plain_3 PARTITION OF plain FOR VALUES IN (3)');
CALL stores_break('CREATE TABLE plain_3 PARTITION OF plain FOR VALUES IN (3); CREATE UNIQUE INDEX ON plain_3 (key)');
CALL stores_break('CREATE TABLE plain_d PARTITION OF plain DEFAULT');
CALL stores_break('CREATE TABLE plain_n PARTITION OF plain FOR VALUES IN (NULL)');
CALL stores_break('DROP TABLE plain_2; CREATE TABLE plain_2 PARTITION OF plain FOR VALUES IN (2, 3); CREATE UNIQUE INDEX ON plain_2 (key)');
CALL stores_break('DROP TABLE plain_2; CREATE TABLE plain_2 PARTITION OF plain FOR VALUES IN (3); CREATE UNIQUE INDEX ON plain_2 (key)');
CALL stores_break('DROP TABLE plain_2; CREATE TABLE plain_2 PARTITION OF plain FOR VALUES IN (2)');
CALL stores_break('DROP TABLE plain_2; CREATE TABLE plain_2 PARTITION OF plain FOR VALUES IN (2) PARTITION BY LIST (key)');
CALL stores_break('DROP TABLE plain_2; CREATE UNLOGGED TABLE plain_2 PARTITION OF plain FOR VALUES IN (2); CREATE UNIQUE INDEX ON plain_2 (key)');
CALL stores_break('ALTER TABLE plain_1 SET UNLOGGED');
CALL stores_break('CREATE FOREIGN DATA WRAPPER stores_fdw; CREATE SERVER stores_server FOREIGN DATA WRAPPER stores_fdw;
	DROP TABLE plain_2; CREATE FOREIGN TABLE plain_2 PARTITION OF plain FOR VALUES IN (2) SERVER stores_server');
CALL stores_break('DROP INDEX plain_0_key_idx');
CALL stores_break('DROP INDEX plain_2_key_idx');
CALL stores_break('DROP INDEX plain_2_key_idx; CREATE INDEX ON plain_2 (key)');
CALL stores_break('DROP INDEX plain_2_key_idx; CREATE UNIQUE INDEX ON plain_2 (key, status)');
CALL stores_break('DROP INDEX plain_2_key_idx; CREATE UNIQUE INDEX ON plain_2 (status, key)');
CALL stores_break('DROP INDEX plain_2_key_idx; CREATE UNIQUE INDEX ON plain_2 (key) WHERE status = ''completed''');
CALL stores_break('DROP INDEX plain_2_key_idx; CREATE UNIQUE INDEX ON plain_2 (lower(key))');
CALL stores_break('DROP INDEX plain_2_key_idx; CREATE UNIQUE INDEX ON plain_2 (key COLLATE "POSIX")');
CALL stores_break('DROP INDEX plain_2_key_idx; CREATE UNIQUE INDEX ON plain_2 (key COLLATE "default")');
CALL stores_break('DROP INDEX plain_2_key_idx; CREATE UNIQUE INDEX ON plain_2 (key text_pattern_ops)');
CALL stores_break('DROP INDEX plain_2_key_idx; CREATE INDEX ON plain_2 USING hash (key)');
CALL stores_break('DROP INDEX plain_2_key_idx; ALTER TABLE plain_2 ADD UNIQUE (key) DEFERRABLE');
CALL stores_break('DROP INDEX plain_2_key_idx; ALTER TABLE plain_2 ADD EXCLUDE (key WITH =)');
CALL stores_break('ALTER TABLE plain ALTER COLUMN key TYPE text COLLATE "POSIX"');
CALL stores_break('ALTER TABLE plain ALTER COLUMN key TYPE varchar COLLATE "C"');
CALL stores_break('ALTER TABLE plain ALTER COLUMN result TYPE jsonb');
CALL stores_break('ALTER TABLE plain ALTER COLUMN token TYPE int');
CALL stores_break('ALTER TABLE plain DROP COLUMN checkpoint');
CALL stores_break('ALTER TABLE plain RENAME COLUMN lease_until TO until');
CALL stores_break('ALTER TABLE plain DROP COLUMN claimed_by; ALTER TABLE plain ADD COLUMN claimed_by text GENERATED ALWAYS AS (key) STORED');
-- ... and what does no harm
CALL stores_break('ALTER TABLE plain DROP CONSTRAINT idem_check');
CALL stores_break('ALTER TABLE plain ALTER COLUMN generation DROP DEFAULT');
CALL stores_break('DROP INDEX plain_2_key_idx; ALTER TABLE plain_2 ADD PRIMARY KEY (key)');
CALL stores_break('DROP INDEX plain_2_key_idx; ALTER TABLE plain_2 ADD UNIQUE (key)');
CALL stores_break('DROP INDEX plain_0_key_idx; ALTER TABLE plain_0 ADD PRIMARY KEY (key) INCLUDE (result)');
CALL stores_break('DROP INDEX plain_0_completed_at_idx; DROP INDEX plain_0_lease_until_idx');
CALL stores_break('CREATE UNIQUE INDEX ON plain_0 (key); CREATE UNIQUE INDEX ON plain_0 (key DESC); DROP INDEX plain_0_key_idx');
CALL stores_break('ALTER TABLE plain_0 RENAME TO something_else; ALTER INDEX plain_0_key_idx RENAME TO key');
CALL stores_break('ALTER TABLE plain SET SCHEMA public; ALTER TABLE public.plain SET SCHEMA stores_test');
CALL stores_break('ALTER TABLE plain ALTER COLUMN attempts DROP DEFAULT, ALTER COLUMN status DROP NOT NULL');
CALL stores_break('REINDEX TABLE plain_0');
CALL stores_break('TRUNCATE plain');
CALL stores_break('CLUSTER plain_0 USING plain_0_key_idx');
CALL stores_break('ALTER TABLE plain_0 SET (fillfactor = 50)');
CALL stores_break('ALTER TABLE plain_0 ALTER COLUMN result SET STORAGE EXTERNAL');
CALL stores_break('CREATE STATISTICS stores_statistics ON key, status FROM plain_0');
CALL stores_break('DROP TABLE plain_2; CREATE TABLE plain_2 PARTITION OF plain FOR VALUES IN (2); CREATE UNIQUE INDEX ON plain_2 (key)');
\set VERBOSITY sqlstate
-- ... an index that failed to become unique is none
DROP INDEX byhand_zero_key_idx;
INSERT INTO byhand (key, status, generation) VALUES ('dup', 'completed', 0), ('dup', 'completed', 0);
CREATE UNIQUE INDEX CONCURRENTLY byhand_invalid ON byhand_zero (key);
SELECT stores_try('byhand');
DELETE FROM byhand WHERE key = 'dup';
REINDEX INDEX byhand_invalid;
SELECT stores_try('byhand');
-- ... of a temporary or unlogged store nothing would be left
CREATE TEMP TABLE temporary (LIKE plain) PARTITION BY LIST (generation);
CREATE TEMP TABLE temporary_0 PARTITION OF temporary FOR VALUES IN (0);
CREATE TEMP TABLE temporary_1 PARTITION OF temporary FOR VALUES IN (1);
CREATE UNIQUE INDEX ON temporary_0 (key);
CREATE UNIQUE INDEX ON temporary_1 (key);
SELECT stores_try('temporary');
-- ... and a table that is gone
SELECT 'flat'::regclass::oid AS flat_oid \gset
DROP TABLE flat;
SELECT idem_once('k', store => :flat_oid);
SELECT idem_lookup('k', store => :flat_oid);

RESET search_path;
SET client_min_messages = error;
DROP SCHEMA stores_test, stores_hostile, "Stores 'Test\" CASCADE;
TRUNCATE idem_completions;
