--
-- CREATE and DROP EXTENSION, and what depends on it
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idem CASCADE;
\set VERBOSITY sqlstate

-- Any schema; not relocatable afterwards
CREATE SCHEMA "Ext Schema";
CREATE EXTENSION idem SCHEMA "Ext Schema";
SELECT extname, extnamespace::regnamespace, extrelocatable FROM pg_extension WHERE extname = 'idem';
ALTER EXTENSION idem SET SCHEMA public;
SELECT "Ext Schema".idem_once('x:a'), "Ext Schema".idem_once('x:a');
SELECT idem_once('x:a');
SET search_path = "Ext Schema";
SELECT idem_once('x:a'), idem_once('x:b'), (idem_claim('x:b')).status;
RESET search_path;
-- ... stores elsewhere find their functions
SELECT "Ext Schema".idem_create_store('public.ext_store');
SELECT "Ext Schema".idem_once('x:a', store => 'ext_store'), "Ext Schema".idem_once('x:a', store => 'ext_store');
INSERT INTO ext_store (key) VALUES ('x:loaded');
SELECT "Ext Schema".idem_set_retention('1 day', 'ext_store');
SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = 'ext_store'::regclass AND adnum = 12;

-- Everything it makes has a comment
WITH members AS (
	SELECT classid, objid FROM pg_depend
	WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
		  AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem')
)
SELECT oid::regprocedure::text FROM pg_proc
WHERE oid IN (SELECT objid FROM members WHERE classid = 'pg_proc'::regclass) AND obj_description(oid, 'pg_proc') IS NULL
UNION ALL
SELECT oid::regclass::text FROM pg_class
WHERE oid IN (SELECT objid FROM members WHERE classid = 'pg_class'::regclass) AND NOT relispartition
	  AND relkind IN ('r', 'p', 'v', 'S') AND obj_description(oid, 'pg_class') IS NULL
UNION ALL
SELECT typname FROM pg_type JOIN pg_class ON pg_class.oid = typrelid AND relkind = 'c'
WHERE pg_type.oid IN (SELECT objid FROM members WHERE classid = 'pg_type'::regclass) AND obj_description(pg_type.oid, 'pg_type') IS NULL;
-- No function is STRICT where NULL must raise; none returns void; what writes
-- is volatile and never parallel
SELECT p.oid::regprocedure FROM pg_proc AS p JOIN pg_depend AS d ON d.objid = p.oid AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e'
WHERE refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem')
	  AND prokind = 'f'
	  -- these only serve the view idem_stores
	  AND proname NOT IN ('idem_store_status', 'idem_generation_sealed_at', 'idem_oldest_record')
	  AND (prorettype = 'void'::regtype
		   OR (proisstrict AND proname NOT IN ('idem_fingerprint', 'idem_generation'))
		   OR (provolatile = 'v') <> (proparallel = 'u'));

-- DROP EXTENSION refuses while stores exist
DROP EXTENSION idem;
SELECT "Ext Schema".idem_once('x:a', store => 'ext_store');
-- ... the default store alone is no reason
BEGIN;
DROP TABLE ext_store;
DROP EXTENSION idem;
SELECT to_regclass('"Ext Schema".idem_completions');
ROLLBACK;
SELECT "Ext Schema".idem_once('x:a');
-- ... nor can one of its members be dropped
DROP TABLE "Ext Schema".idem_completions;
DROP TABLE "Ext Schema".idem_completions_1;
DROP FUNCTION "Ext Schema".idem_check(text, text, smallint, int);
DROP FUNCTION "Ext Schema".idem_forget(text, regclass);

-- With CASCADE it never drops them or a column of theirs
SELECT count(*), array_agg(attname ORDER BY attnum) FROM pg_attribute WHERE attrelid = 'ext_store'::regclass AND attnum > 0 AND NOT attisdropped;
DROP EXTENSION idem CASCADE;
SELECT count(*), array_agg(attname ORDER BY attnum) FROM pg_attribute WHERE attrelid = 'ext_store'::regclass AND attnum > 0 AND NOT attisdropped;
SELECT key, status FROM ext_store ORDER BY 1;
SELECT count(*) FROM pg_constraint WHERE conrelid = 'ext_store'::regclass AND contype = 'c';
SELECT count(*) FROM pg_inherits WHERE inhparent = 'ext_store'::regclass;
SELECT count(*) FROM pg_index JOIN pg_inherits ON indrelid = inhrelid WHERE inhparent = 'ext_store'::regclass;
SELECT count(*) FROM pg_proc WHERE proname LIKE 'idem\_%';

-- ... and when it is created again they are stores as before, in any schema
CREATE EXTENSION idem;
SELECT idem_once('x:a', store => 'ext_store'), idem_once('x:c', store => 'ext_store'), idem_once('x:c', store => 'ext_store');
SELECT idem_once('x:a');
SELECT status, result FROM idem_claim('x:loaded', store => 'ext_store');
-- ... what they had been noted is gone
SELECT count(*) FROM idem_store_state;
SELECT idem_set_retention('1 day', 'ext_store');
SELECT retention FROM idem_store_state WHERE store = 'ext_store'::regclass;

-- Claims and DROP EXTENSION in one transaction
BEGIN;
SELECT claimed FROM idem_claim('x:d', store => 'ext_store');
SELECT idem_once('x:e', store => 'ext_store');
DROP EXTENSION idem CASCADE;
COMMIT;
SELECT extname FROM pg_extension WHERE extname = 'idem';
SELECT count(*) FROM idem_lookup('x:e', store => 'ext_store');
BEGIN;
SELECT idem_once('x:e', store => 'ext_store');
SELECT claimed FROM idem_claim('x:f', store => 'ext_store');
SELECT idem_release('x:f', store => 'ext_store');
DROP EXTENSION idem CASCADE;
COMMIT;
SELECT key FROM ext_store ORDER BY 1;
-- ... the session that has the library loaded goes on without it
SELECT idem_once('x:g', store => 'ext_store');
BEGIN;
CREATE EXTENSION idem SCHEMA "Ext Schema";
SELECT "Ext Schema".idem_once('x:e', store => 'ext_store'), "Ext Schema".idem_once('x:g', store => 'ext_store');
SELECT "Ext Schema".idem_once('x:g'), "Ext Schema".idem_once('x:g');
ROLLBACK;
CREATE EXTENSION idem SCHEMA "Ext Schema";
SELECT "Ext Schema".idem_once('x:g'), "Ext Schema".idem_once('x:g');
-- ... a prepared statement and a function from before
DROP EXTENSION idem CASCADE;
CREATE EXTENSION idem;
PREPARE ext_prepared AS SELECT idem_once('x:p');
EXECUTE ext_prepared;
CREATE FUNCTION ext_function() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RETURN idem_once('x:p'); END $$;
SELECT ext_function();
DROP EXTENSION idem CASCADE;
EXECUTE ext_prepared;
SELECT ext_function();
CREATE EXTENSION idem;
EXECUTE ext_prepared;
SELECT ext_function();
DEALLOCATE ext_prepared;

-- A handler that drops the ground it stands on
CREATE FUNCTION ext_drops() RETURNS int LANGUAGE plpgsql AS $$ BEGIN DROP EXTENSION idem CASCADE; RETURN 1; END $$;
SELECT claimed FROM idem_run('x:drops', 'ext_drops', store => 'ext_store');
SELECT count(*) FROM pg_extension WHERE extname = 'idem';

-- What a dump of the data carries: the default store and the bookkeeping
SELECT c.relname FROM pg_extension AS e, unnest(extconfig) AS oid JOIN pg_class AS c USING (oid) WHERE extname = 'idem' ORDER BY 1;

-- Two in one database cannot be, nor one where something is in the way
CREATE EXTENSION idem;
DROP EXTENSION idem CASCADE;
CREATE TABLE idem_completions (x int);
CREATE EXTENSION idem;
SELECT x FROM idem_completions;
DROP TABLE idem_completions;
CREATE TABLE idem_completions_2 (x int);
CREATE EXTENSION idem;
DROP TABLE idem_completions_2;
CREATE EXTENSION idem;
SELECT idem_once('x:end');

DROP TABLE ext_store;
DROP FUNCTION ext_function, ext_drops;
DROP SCHEMA "Ext Schema";
TRUNCATE idem_completions;
