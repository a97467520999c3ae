--
-- idem_run(): claim, call a handler, complete with what it returns
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

SELECT pg_get_function_identity_arguments(oid), prorettype::regtype,
	   provolatile, proisstrict, proparallel
FROM pg_proc WHERE proname = 'idem_run';

CREATE SCHEMA run_test;
CREATE TABLE run_test.effect (n int, request jsonb);
CREATE SEQUENCE run_test.calls;
SET search_path = run_test, public;

-- The handler runs once; its result is stored and replayed
CREATE FUNCTION invoice(request jsonb) RETURNS json LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO run_test.effect VALUES (nextval('run_test.calls'), request);
	RETURN '{"no": 1.10, "no": 2}';
END $$;
SELECT claimed, status, result, completed_at IS NOT NULL AS completed
FROM idem_run('run:a', 'invoice', '{"amount": 4200}');
SELECT claimed, status, result, completed_at IS NOT NULL AS completed
FROM idem_run('run:a', 'invoice', '{"amount": 4200.0}');
SELECT claimed, status, result FROM idem_run('run:a', 'invoice');
SELECT claimed, status, result FROM idem_claim('run:a', '{"amount": 4200}');
SELECT * FROM run_test.effect;
SELECT status, result, attempts FROM idem_lookup('run:a');
-- ... the request is fingerprinted
SELECT status FROM idem_run('run:a', 'invoice', '{"amount": 4201}');
-- ... and the outcome is that of the record
SELECT r.completed_at = l.completed_at AS as_stored, r.result::text = l.result::text AS as_stored
FROM idem_run('run:a', 'invoice') AS r, idem_lookup('run:a') AS l;

-- In one statement, twice the same key
SELECT r.claimed, r.status FROM unnest('{run:b,run:b}'::text[]) AS k, LATERAL idem_run(k, 'invoice', '[1]') AS r;
SELECT count(*) FROM run_test.effect WHERE request = '[1]';

-- Results of every kind
CREATE FUNCTION r_json() RETURNS json LANGUAGE sql AS $$ SELECT '{"b":1.10,"a":1e2,"a":2}'::json $$;
CREATE FUNCTION r_jsonb() RETURNS jsonb LANGUAGE sql AS $$ SELECT '{"b":1.10,"a":1e2,"a":2}'::jsonb $$;
CREATE FUNCTION r_text() RETURNS text LANGUAGE sql AS $$ SELECT '  [1.0]  ' $$;
CREATE FUNCTION r_varchar() RETURNS varchar LANGUAGE sql AS $$ SELECT '"v"'::varchar $$;
CREATE FUNCTION r_char() RETURNS char(3) LANGUAGE sql AS $$ SELECT 'x'::char(3) $$;
CREATE FUNCTION r_bool() RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;
CREATE FUNCTION r_int() RETURNS int LANGUAGE sql AS $$ SELECT 0 $$;
CREATE FUNCTION r_bigint() RETURNS bigint LANGUAGE sql AS $$ SELECT 1533947986218845197 $$;
CREATE FUNCTION r_numeric() RETURNS numeric LANGUAGE sql AS $$ SELECT 1.10 $$;
CREATE FUNCTION r_float() RETURNS float8 LANGUAGE sql AS $$ SELECT 'NaN'::float8 $$;
CREATE FUNCTION r_uuid() RETURNS uuid LANGUAGE sql AS $$ SELECT 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'::uuid $$;
CREATE FUNCTION r_time() RETURNS timestamp LANGUAGE sql AS $$ SELECT '2020-02-03 04:05:06.7'::timestamp $$;
CREATE FUNCTION r_array() RETURNS int[] LANGUAGE sql AS $$ SELECT '{1,NULL,3}'::int[] $$;
CREATE FUNCTION r_jsons() RETURNS json[] LANGUAGE sql AS $$ SELECT ARRAY['{"a":1.0}', 'null']::json[] $$;
CREATE FUNCTION r_row() RETURNS run_test.effect LANGUAGE sql AS $$ SELECT 7, '{"x":1.0}'::jsonb $$;
CREATE FUNCTION r_null_row() RETURNS run_test.effect LANGUAGE sql AS $$ SELECT NULL::run_test.effect $$;
CREATE FUNCTION r_out(OUT a int, OUT b text) LANGUAGE sql AS $$ SELECT 1, 'two' $$;
CREATE FUNCTION r_out1(OUT a int) LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION r_record() RETURNS record LANGUAGE sql AS $$ SELECT 1 AS a, 'two'::text AS b $$;
CREATE FUNCTION r_plpgsql_record() RETURNS record LANGUAGE plpgsql AS $$
DECLARE r record;
BEGIN
	SELECT 1 AS a, 'two'::text AS b INTO r;
	RETURN r;
END $$;
CREATE FUNCTION r_plpgsql_row() RETURNS run_test.effect LANGUAGE plpgsql AS $$
DECLARE r run_test.effect;
BEGIN
	r.n := 8;
	RETURN r;
END $$;
CREATE FUNCTION r_plpgsql_array() RETURNS int[] LANGUAGE plpgsql AS $$
DECLARE a int[] := '{1,2}';
BEGIN
	a[3] := 3;
	RETURN a;
END $$;
CREATE FUNCTION r_void() RETURNS void LANGUAGE sql AS $$ SELECT $$;
CREATE FUNCTION r_null() RETURNS json LANGUAGE sql AS $$ SELECT NULL::json $$;
CREATE FUNCTION r_json_null() RETURNS json LANGUAGE sql AS $$ SELECT 'null'::json $$;
CREATE TYPE mood AS ENUM ('good');
CREATE FUNCTION r_enum() RETURNS mood LANGUAGE sql AS $$ SELECT 'good'::mood $$;
CREATE DOMAIN json_domain AS json;
CREATE FUNCTION r_json_domain() RETURNS json_domain LANGUAGE sql AS $$ SELECT '{"d":1.0}'::json_domain $$;
CREATE DOMAIN int_domain AS int;
CREATE FUNCTION r_int_domain() RETURNS int_domain LANGUAGE sql AS $$ SELECT 5::int_domain $$;
CREATE DOMAIN row_domain AS run_test.effect;
CREATE FUNCTION r_row_domain() RETURNS row_domain LANGUAGE sql AS $$ SELECT row(9, NULL)::run_test.effect::row_domain $$;
CREATE FUNCTION r_internal() RETURNS xid LANGUAGE sql AS $$ SELECT '3'::xid $$;
SELECT h, claimed, status, result
FROM unnest('{r_json,r_jsonb,r_text,r_varchar,r_char,r_bool,r_int,r_bigint,r_numeric,r_float,r_uuid,
	r_time,r_array,r_jsons,r_row,r_null_row,r_out,r_out1,r_record,r_plpgsql_record,r_plpgsql_row,
	r_plpgsql_array,r_void,r_null,r_json_null,r_enum,r_json_domain,r_int_domain,r_row_domain,
	r_internal}'::text[]) AS h, LATERAL idem_run('run:' || h, h);
-- ... and each replays the same bytes
SELECT count(*), bool_and(NOT r.claimed AND r.result::text IS NOT DISTINCT FROM l.result::text) AS same
FROM idem_completions AS l, LATERAL idem_run(l.key, substr(l.key, 5)) AS r
WHERE l.key LIKE 'run:r\_%';
-- ... text must be JSON, and the error undoes all
CREATE FUNCTION r_bad() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO run_test.effect VALUES (99);
	RETURN 'done';
END $$;
SELECT idem_run('run:bad', 'r_bad');
SELECT count(*) FROM run_test.effect WHERE n = 99;
SELECT count(*) FROM idem_lookup('run:bad');

-- f(jsonb) is preferred to f(); either can be named by its signature
CREATE FUNCTION with_or_without() RETURNS text LANGUAGE sql AS $$ SELECT '"without"' $$;
CREATE FUNCTION with_or_without(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT to_json(coalesce($1, '"null"'))::text $$;
SELECT result FROM idem_run('run:both1', 'with_or_without', '"request"');
SELECT result FROM idem_run('run:both2', 'with_or_without');
SELECT result FROM idem_run('run:both3', 'with_or_without()', '"request"');
SELECT result FROM idem_run('run:both4', 'with_or_without(jsonb)', '"request"');
SELECT result FROM idem_run('run:both5', 'run_test.with_or_without ( pg_catalog.jsonb )', '"request"');
SELECT result FROM idem_run('run:both6', ' run_test . with_or_without ', '"request"');
CREATE FUNCTION "Both.Names"() RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION "Odd ""Name(" (jsonb) RETURNS int LANGUAGE sql AS $$ SELECT 2 $$;
SELECT result FROM idem_run('run:both7', 'run_test."Both.Names"');
SELECT result FROM idem_run('run:both8', '"Odd ""Name("(jsonb)');
SELECT result FROM idem_run('run:both9', '"Odd ""Name("');

-- What cannot be a handler
CREATE PROCEDURE p() LANGUAGE sql AS $$ SELECT 1 $$;
CREATE PROCEDURE p_jsonb(jsonb) LANGUAGE sql AS $$ SELECT 1 $$;
CREATE AGGREGATE agg(jsonb) (sfunc = jsonb_concat, stype = jsonb);
CREATE FUNCTION f_set() RETURNS SETOF int LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION f_table(jsonb) RETURNS TABLE (a int) LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION f_trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE FUNCTION f_event() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN END $$;
CREATE FUNCTION f_two(jsonb, int DEFAULT 1) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION f_json(json) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION f_any(anyelement) RETURNS anyelement LANGUAGE sql AS $$ SELECT $1 $$;
CREATE FUNCTION f_variadic(VARIADIC jsonb[]) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION f_inout(INOUT r jsonb) LANGUAGE sql AS $$ SELECT r $$;
SELECT idem_run('run:not', 'p');
SELECT idem_run('run:not', 'p_jsonb', '1');
SELECT idem_run('run:not', 'agg', '1');
SELECT idem_run('run:not', 'agg(jsonb)', '1');
SELECT idem_run('run:not', 'pg_catalog.row_number');
SELECT idem_run('run:not', 'f_set');
SELECT idem_run('run:not', 'f_table', '1');
SELECT idem_run('run:not', 'f_trigger');
SELECT idem_run('run:not', 'f_event');
SELECT idem_run('run:not', 'f_two', '1');
SELECT idem_run('run:not', 'f_two(jsonb,int)', '1');
SELECT idem_run('run:not', 'f_json', '1');
SELECT idem_run('run:not', 'f_json(json)', '1');
SELECT idem_run('run:not', 'f_any', '1');
SELECT idem_run('run:not', 'f_any(anyelement)', '1');
SELECT idem_run('run:not', 'f_variadic', '1');
SELECT idem_run('run:not', 'f_variadic(jsonb[])', '1');
SELECT idem_run('run:not', 'no_such_function', '1');
SELECT idem_run('run:not', 'no_such_function(jsonb)', '1');
SELECT idem_run('run:not', 'no_such_schema.f', '1');
SELECT idem_run('run:not', '');
SELECT idem_run('run:not', 'a..b');
SELECT idem_run('run:not', 'f(');
SELECT idem_run('run:not', NULL);
SELECT idem_run(NULL, 'invoice');
SELECT idem_run('', 'invoice');
SELECT idem_run('run:not', 'invoice', store => NULL);
SELECT idem_run('run:not', 'invoice', wait => '-1 s');
SELECT result FROM idem_run('run:inout', 'f_inout', '{"a":1.0}');
SELECT count(*) FROM idem_lookup('run:not');

-- A strict handler is not called with NULL, so that is no way to complete
CREATE FUNCTION f_strict(jsonb) RETURNS int LANGUAGE sql STRICT AS $$ SELECT 1 $$;
CREATE FUNCTION f_strict0() RETURNS int LANGUAGE sql STRICT AS $$ SELECT 1 $$;
SELECT idem_run('run:strict', 'f_strict');
SELECT result FROM idem_run('run:strict', 'f_strict', 'null');
SELECT result FROM idem_run('run:strict0', 'f_strict0');

-- An error in the handler rolls back the claim and all
CREATE FUNCTION fails(request jsonb) RETURNS int LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO run_test.effect VALUES (-1, request);
	IF request ? 'fail' THEN
		RAISE EXCEPTION 'no' USING ERRCODE = 'P0ABC';
	END IF;
	RETURN 1;
END $$;
SELECT idem_run('run:fails', 'fails', '{"fail": 1}');
BEGIN;
SAVEPOINT s;
SELECT idem_run('run:fails', 'fails', '{"fail": 1}');
ROLLBACK TO s;
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
SELECT claimed, status, result FROM idem_run('run:fails', 'fails', '{}');
COMMIT;
SELECT count(*) FROM run_test.effect WHERE n = -1;

-- A handler that ends its own claim, or asks for its key again
CREATE FUNCTION completes(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	RETURN idem_complete(request #>> '{}', '"its own"');
END $$;
CREATE FUNCTION completes_other(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_complete(request #>> '{}', '"its own"');
	RETURN 'not even JSON';
END $$;
CREATE FUNCTION releases(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_release(request #>> '{}');
	RETURN '"released"';
END $$;
CREATE FUNCTION reclaims(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem_release(request #>> '{}'), idem_claim(request #>> '{}');
	RETURN '"reclaimed"';
END $$;
CREATE FUNCTION recurses(request jsonb) RETURNS json LANGUAGE plpgsql AS $$
DECLARE o idem_outcome;
BEGIN
	o := idem_run(request #>> '{}', 'recurses', request);
	RETURN to_json(o.status);
END $$;
CREATE FUNCTION undoes(request jsonb) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	BEGIN
		PERFORM idem_complete(request #>> '{}', '"undone"');
		PERFORM 1 / 0;
	EXCEPTION WHEN division_by_zero THEN
		NULL;
	END;
	RETURN '"after the undoing"';
END $$;
SELECT claimed, status, result FROM idem_run('run:completes', 'completes', '"run:completes"');
SELECT claimed, status, result FROM idem_run('run:completes', 'completes', '"run:completes"');
SELECT claimed, status, result FROM idem_run('run:completes_other', 'completes_other', '"run:completes_other"');
SELECT claimed, status, result FROM idem_run('run:completes_other', 'completes_other', '"run:completes_other"');
SELECT claimed, status, result FROM idem_run('run:reclaims', 'reclaims', '"run:reclaims"');
SELECT claimed, status, result FROM idem_run('run:recurses', 'recurses', '"run:recurses"');
SELECT claimed, status, result FROM idem_run('run:undoes', 'undoes', '"run:undoes"');
-- one that gave its claim up has not done it: the next one runs
SELECT claimed, status, result FROM idem_run('run:releases', 'releases', '"run:releases"');
SELECT count(*) FROM idem_lookup('run:releases');
SELECT claimed, status, result FROM idem_run('run:releases', 'undoes', '"run:releases"');
SELECT key, result FROM idem_completions WHERE key IN ('run:completes', 'run:reclaims', 'run:recurses', 'run:undoes', 'run:releases') ORDER BY 1;

-- Handlers that claim other keys, by any way; one that leaves them open fails
CREATE FUNCTION nests(request jsonb) RETURNS json LANGUAGE plpgsql AS $$
DECLARE n int := request::int;
BEGIN
	INSERT INTO run_test.effect VALUES (1000 + n);
	IF n > 0 THEN
		RETURN json_build_array(n, (SELECT result FROM idem_run('run:nest:' || n - 1, 'nests', to_jsonb(n - 1))));
	END IF;
	RETURN '[0]';
END $$;
SELECT claimed, result FROM idem_run('run:nest:4', 'nests', '4');
SELECT claimed, result FROM idem_run('run:nest:6', 'nests', '6');
SELECT count(*), count(DISTINCT n) FROM run_test.effect WHERE n >= 1000;
CREATE FUNCTION leaves_open() RETURNS text LANGUAGE sql AS $$ SELECT to_json(status)::text FROM idem_claim('run:open') $$;
SELECT result FROM idem_run('run:leaves_open', 'leaves_open');
SELECT count(*) FROM idem_lookup('run:leaves_open');

-- States that are not "claimed" never run the handler
INSERT INTO idem_completions (key, status, lease_until)
VALUES ('run:leased', 'leased', 'infinity'), ('run:lease_over', 'leased', '-infinity'),
	   ('run:skipped', 'skipped', NULL), ('run:released', 'released', NULL);
CREATE FUNCTION called() RETURNS bigint LANGUAGE sql AS $$ SELECT nextval('run_test.calls') $$;
SELECT setval('run_test.calls', 1, false);
SELECT status FROM idem_run('run:leased', 'called');
SELECT status FROM idem_run('run:lease_over', 'called');
SELECT claimed, status, result FROM idem_run('run:skipped', 'called');
SELECT status FROM idem_run('run:late', 'called', first_sent => '-infinity');
BEGIN;
SELECT claimed FROM idem_claim('run:held');
SELECT claimed, status, result FROM idem_run('run:held', 'called');
SELECT idem_complete('run:held', '"outside"');
SELECT claimed, status, result FROM idem_run('run:held', 'called');
COMMIT;
SELECT is_called FROM run_test.calls;
SELECT claimed, status, result FROM idem_run('run:released', 'called');

-- A handler that was replaced, or dropped and made again, is noticed
PREPARE run_it AS SELECT claimed, result FROM idem_run($1, 'changes');
CREATE FUNCTION changes() RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
EXECUTE run_it('run:changes:1');
CREATE OR REPLACE FUNCTION changes() RETURNS int LANGUAGE sql AS $$ SELECT 2 $$;
EXECUTE run_it('run:changes:2');
DROP FUNCTION changes();
EXECUTE run_it('run:changes:3');
CREATE FUNCTION changes(jsonb) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RETURN '"new"'; END $$;
EXECUTE run_it('run:changes:3');
CREATE SCHEMA run_test2;
CREATE FUNCTION run_test2.changes() RETURNS text LANGUAGE sql AS $$ SELECT '"other schema"' $$;
SET search_path = run_test2, public;
EXECUTE run_it('run:changes:4');
SET search_path = run_test, public;
-- ... also by itself
CREATE FUNCTION drops_itself() RETURNS json LANGUAGE plpgsql AS $$
BEGIN
	DROP FUNCTION run_test.drops_itself();
	RETURN '"gone"';
END $$;
SELECT result FROM idem_run('run:drops', 'drops_itself');
SELECT result FROM idem_run('run:drops', 'drops_itself');

-- It sees what its own statement has done, and what it does itself is seen
CREATE FUNCTION counts() RETURNS bigint LANGUAGE sql STABLE AS $$ SELECT count(*) FROM run_test.effect WHERE n = 5000 $$;
CREATE FUNCTION adds() RETURNS bigint LANGUAGE sql AS $$
	INSERT INTO run_test.effect VALUES (5000);
	SELECT count(*) FROM run_test.effect WHERE n = 5000;
$$;
SELECT (idem_run('run:s1', 'adds')).result AS adds, (idem_run('run:s2', 'counts')).result AS counts,
	   (idem_run('run:s3', 'adds')).result AS adds, (idem_run('run:s4', 'counts')).result AS counts;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT result FROM idem_run('run:s5', 'adds');
SELECT result FROM idem_run('run:s6', 'counts');
COMMIT;

-- EXECUTE privilege on the handler; SECURITY DEFINER and SET are honoured
CREATE ROLE regress_idem_run;
GRANT USAGE ON SCHEMA run_test TO regress_idem_run;
GRANT SELECT, INSERT ON idem_completions TO regress_idem_run;
CREATE FUNCTION definer() RETURNS json LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog
	AS $$ SELECT json_build_array(current_user <> session_user, current_setting('search_path')) $$;
CREATE FUNCTION invoker() RETURNS json LANGUAGE sql SET work_mem = '77MB'
	AS $$ SELECT json_build_array(current_user, current_setting('work_mem')) $$;
CREATE FUNCTION forbidden() RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
REVOKE ALL ON FUNCTION forbidden() FROM PUBLIC;
SET ROLE regress_idem_run;
SELECT result FROM idem_run('run:invoker', 'invoker');
SELECT result FROM idem_run('run:forbidden', 'forbidden');
SELECT result FROM idem_run('run:effect', 'adds');
RESET ROLE;
SET SESSION AUTHORIZATION regress_idem_run;
SELECT result FROM idem_run('run:definer', 'definer');
RESET SESSION AUTHORIZATION;
SELECT count(*) FROM idem_completions WHERE key IN ('run:forbidden', 'run:effect');
REVOKE ALL ON idem_completions FROM regress_idem_run;
DROP OWNED BY regress_idem_run;
DROP ROLE regress_idem_run;

-- Read only
BEGIN READ ONLY;
SELECT * FROM idem_run('run:a', 'invoice');
ROLLBACK;

-- Another store
SELECT idem_create_store('run_test.other');
SELECT claimed, result FROM idem_run('run:a', 'r_json', store => 'other');
SELECT claimed, result FROM idem_run('run:a', 'r_json', store => 'run_test.other');

-- A handler that changes the store under its own claim
CREATE FUNCTION truncates() RETURNS int LANGUAGE plpgsql AS $$
BEGIN
	TRUNCATE run_test.other;
	RETURN 1;
END $$;
SELECT claimed, result FROM idem_run('run:truncates', 'truncates', store => 'other');
SELECT key FROM run_test.other;
CREATE FUNCTION alters() RETURNS int LANGUAGE plpgsql AS $$
BEGIN
	ALTER TABLE run_test.other ADD COLUMN note text NOT NULL DEFAULT 'by default';
	CREATE INDEX ON run_test.other (note);
	RETURN 2;
END $$;
SELECT claimed, result FROM idem_run('run:alters', 'alters', store => 'other');
SELECT key, note FROM run_test.other ORDER BY 1;
CREATE FUNCTION drops_part() RETURNS int LANGUAGE plpgsql AS $$
BEGIN
	DROP TABLE run_test.other_3;
	RETURN 3;
END $$;
SELECT claimed, result FROM idem_run('run:drops_part', 'drops_part', store => 'other');
CREATE FUNCTION drops_store() RETURNS int LANGUAGE plpgsql AS $$
BEGIN
	DROP TABLE run_test.other;
	RETURN 3;
END $$;
SELECT claimed, result FROM idem_run('run:drops_store', 'drops_store', store => 'other');
SELECT key, note FROM run_test.other ORDER BY 1;

RESET search_path;
SET client_min_messages = error;
DROP SCHEMA run_test, run_test2 CASCADE;
TRUNCATE idem_completions;
