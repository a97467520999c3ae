--
-- Results: what was stored is replayed byte for byte
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

-- Results given as JSON text, kept as they are
CREATE TABLE results_text (n serial PRIMARY KEY, body text);
INSERT INTO results_text (body) VALUES
	(NULL), ('null'), ('0'), ('-0'), ('false'), ('true'), ('""'), ('{}'), ('[]'),
	('{"b":1.10,"a":1e2,"a":2}'), ('"\u0000"'), ('{"\u0000":"\uD834\uDD1E"}'),
	('1533947986218845197'), ('123456789012345678901234567890.1234567890123456789'),
	('1E+400'), ('1e-400'), ('  { "x" : [ 1 , 2 ] }  '), (E'[\n\t1\r\n]\n'),
	('"\/\b\f\n\r\t\"\\"'), (U&'"\00E9 e\0301 \+01F600"'), ('"\u00e9"'),
	('{"":"","":null}'), ('"' || repeat('x', 10000) || '"'),
	(repeat('[', 500) || repeat(']', 500)),
	('"' || (SELECT string_agg(md5(i::text), '' ORDER BY i) FROM generate_series(1, 33000) AS i) || '"'),
	('"' || repeat(U&'\00E9', 524288) || '"'),
	('[' || repeat('1.0, ', 200000) || '1.0]');
SELECT n, octet_length(body) FROM results_text WHERE octet_length(body) > 1000 ORDER BY n;

-- claim in one statement, complete in the next, replay here and elsewhere
BEGIN;
SELECT count(*) FROM results_text, LATERAL (SELECT * FROM idem_claim('text:' || n)) AS c WHERE claimed;
SELECT n, idem_complete('text:' || n, body)::text IS NOT DISTINCT FROM body AS returned
FROM results_text ORDER BY n;
SELECT count(*) FROM results_text, LATERAL (SELECT * FROM idem_claim('text:' || n)) AS c
WHERE status = 'completed' AND result::text IS NOT DISTINCT FROM body;
COMMIT;
SELECT count(*) FROM results_text, LATERAL (SELECT * FROM idem_claim('text:' || n)) AS c
WHERE status = 'completed' AND result::text IS NOT DISTINCT FROM body;
SELECT count(*) FROM results_text, LATERAL (SELECT * FROM idem_try_claim('text:' || n)) AS c
WHERE status = 'completed' AND result::text IS NOT DISTINCT FROM body;
SELECT count(*) FROM results_text, LATERAL idem_lookup('text:' || n) AS l
WHERE result::text IS NOT DISTINCT FROM body;
SELECT count(*)
FROM idem_claim_batch((SELECT array_agg('text:' || n ORDER BY n) FROM results_text)) AS b
JOIN results_text ON n = ordinality
WHERE result::text IS NOT DISTINCT FROM body;
SELECT result FROM idem_claim('text:10');
SELECT result FROM idem_claim('text:11');
SELECT result FROM idem_claim('text:13');
-- ... SQL NULL and JSON null are two things
SELECT n, result IS NULL AS is_null, result::text FROM generate_series(1, 2) AS n, LATERAL idem_claim('text:' || n);

-- By a handler, and by a value of type json
CREATE FUNCTION results_handler(request jsonb) RETURNS json LANGUAGE sql STABLE AS $$
	SELECT body::json FROM results_text WHERE n = request::int
$$;
SELECT count(*) FROM results_text, LATERAL idem_run('run:' || n, 'results_handler', to_jsonb(n)) AS r
WHERE claimed AND status = 'completed' AND result::text IS NOT DISTINCT FROM body;
SELECT count(*) FROM results_text, LATERAL idem_run('run:' || n, 'results_handler', to_jsonb(n)) AS r
WHERE NOT claimed AND status = 'completed' AND result::text IS NOT DISTINCT FROM body;
BEGIN;
SELECT count(*) FROM results_text, LATERAL (SELECT * FROM idem_claim('json:' || n)) AS c WHERE claimed;
SELECT count(idem_complete('json:' || n, body::json)) FROM results_text;
COMMIT;
SELECT count(*) FROM results_text, LATERAL (SELECT * FROM idem_claim('json:' || n)) AS c
WHERE result::text IS NOT DISTINCT FROM body;

-- Out of line and compressed where the source was, and the source is gone then
CREATE TABLE results_json (n int, body json);
INSERT INTO results_json SELECT n, body::json FROM results_text;
BEGIN;
SELECT count(*) FROM results_text, LATERAL (SELECT * FROM idem_claim('toast:' || n)) AS c WHERE claimed;
SELECT count(idem_complete('toast:' || n, body)) FROM results_json;
COMMIT;
TRUNCATE results_json;
SELECT count(*) FROM results_text, LATERAL (SELECT * FROM idem_claim('toast:' || n)) AS c
WHERE result::text IS NOT DISTINCT FROM body;
CREATE FUNCTION results_destroyer(request jsonb) RETURNS json LANGUAGE plpgsql AS $$
DECLARE r json;
BEGIN
	INSERT INTO results_json SELECT n, body::json FROM results_text WHERE n = request::int;
	SELECT body INTO r FROM results_json WHERE n = request::int;
	DELETE FROM results_json;
	RETURN r;
END $$;
SELECT count(*) FROM results_text, LATERAL idem_run('destroyed:' || n, 'results_destroyer', to_jsonb(n)) AS r
WHERE claimed AND result::text IS NOT DISTINCT FROM body;
SELECT count(*) FROM results_text, LATERAL (SELECT * FROM idem_claim('destroyed:' || n)) AS c
WHERE result::text IS NOT DISTINCT FROM body;

-- jsonb is kept as it prints
BEGIN;
SELECT count(*) FROM idem_claim('jsonb');
SELECT idem_complete('jsonb', '{"b":1.10,"a":1e2,"a":2}'::jsonb);
COMMIT;
SELECT result::text = '{"b":1.10,"a":1e2,"a":2}'::jsonb::text AS as_it_prints FROM idem_claim('jsonb');

-- Any other type goes through to_json()
CREATE TYPE results_mood AS ENUM ('good "mood"');
CREATE TYPE results_pair AS (a int, b text);
CREATE DOMAIN results_json_domain AS json;
CREATE DOMAIN results_jsonb_domain AS jsonb;
CREATE DOMAIN results_text_domain AS text;
CREATE DOMAIN results_int_domain AS int;
CREATE TABLE results_any (n int, result json);
DO $do$
DECLARE
	expressions text[] := ARRAY['1', '(-32768)::smallint', '9223372036854775807', '1.10', '''1e40''::numeric',
		'0.1::float4', '''-0''::float8', '''-Infinity''::float8', 'true', '''\xDEADBEEF''::bytea', '''2020-02-03''::date', '''infinity''::timestamp', '''2020-02-03 04:05:06.7''::timestamp',
		'''04:05''::time', '''{}''::int[]', 'ARRAY[[1,2],[3,NULL]]', 'ARRAY[''null'', ''{"a":1.0}'']::json[]',
		'ROW(1, ''two'', NULL)', 'ROW(1, ''"'')::results_pair', 'NULL::results_pair', 'ROW(NULL, NULL)::results_pair', 'NULL::int', 'NULL::json', 'NULL::text', 'NULL',
		'''good "mood"''::results_mood', '''{"d":1.0}''::results_json_domain', '''{"d":1.0}''::results_jsonb_domain',
		'''"text"''::results_text_domain', '5::results_int_domain', '''{"u": "untyped"}''', '''["varchar"]''::varchar(20)',
		'''[1,5)''::int4range', '''10.0.0.0/8''::cidr', '''(1,2)''::point', '''a b''::tsvector', '''101''::bit(3)'];
BEGIN
	FOR i IN 1..array_length(expressions, 1) LOOP
		PERFORM idem_claim('any:' || i);
		EXECUTE format('INSERT INTO results_any VALUES (%s, idem_complete(%L, %s))', i, 'any:' || i, expressions[i]);
	END LOOP;
END $do$;
SELECT a.n, c.result, c.result::text IS NOT DISTINCT FROM a.result::text AS as_returned
FROM results_any AS a, LATERAL (SELECT * FROM idem_claim('any:' || a.n)) AS c ORDER BY 1;
-- ... by name of the argument, in every place
BEGIN;
SELECT count(*) FROM idem_claim_batch('{n1,n2,n3,n4}');
SELECT idem_complete('n1', result => 5), idem_complete(key => 'n2', result => '{"x": 1}'),
	   idem_complete(result => ARRAY[1], key => 'n3', store => 'idem_completions'),
	   idem_complete('n4', store => 'idem_completions');
COMMIT;
-- ... and with a parameter, whose type decides
PREPARE results_untyped AS SELECT idem_complete('p1', $1);
PREPARE results_int(int) AS SELECT idem_complete('p2', $1);
PREPARE results_text(text) AS SELECT idem_complete('p3', $1);
PREPARE results_json(json) AS SELECT idem_complete('p4', $1);
BEGIN;
SELECT count(*) FROM idem_claim_batch('{p1,p2,p3,p4}');
EXECUTE results_untyped('{"b":1.10}');
EXECUTE results_int(5);
EXECUTE results_text('[1.0]');
EXECUTE results_json('[1.0]');
COMMIT;
DEALLOCATE ALL;
-- ... a whole row, also from a variable
CREATE VIEW results_view AS SELECT 1.10 AS a, ARRAY[1, 2] AS b;
BEGIN;
SELECT count(*) FROM idem_claim_batch('{row:1,row:2,row:3}');
SELECT idem_complete('row:1', v) FROM results_view AS v;
DO $$
DECLARE
	r record;
	v results_view;
	a int[] := '{1,2,3}';
BEGIN
	SELECT * INTO r FROM results_view;
	PERFORM idem_complete('row:2', r);
	a[2] := 7;
	PERFORM idem_complete('row:3', a);
END $$;
COMMIT;
SELECT k, c.result FROM unnest('{row:1,row:2,row:3}'::text[]) AS k, LATERAL (SELECT * FROM idem_claim(k)) AS c;

-- A composite with a dropped column, one of a table that is gone after COMMIT
CREATE TABLE results_dropped (a int, b int, c text);
ALTER TABLE results_dropped DROP COLUMN b;
INSERT INTO results_dropped VALUES (1, repeat('x', 5));
BEGIN;
SELECT count(*) FROM idem_claim('dropped');
SELECT idem_complete('dropped', t) FROM results_dropped AS t;
DROP TABLE results_dropped;
COMMIT;
SELECT result FROM idem_claim('dropped');

-- Settings that change how values print do not change what is stored
SET timezone = 'Asia/Kolkata';
SET datestyle = 'SQL, DMY';
SET extra_float_digits = 0;
SET bytea_output = 'escape';
SELECT count(*) FROM results_any AS a, LATERAL (SELECT * FROM idem_claim('any:' || a.n)) AS c
WHERE c.result::text IS NOT DISTINCT FROM a.result::text;
RESET timezone;
RESET datestyle;
RESET extra_float_digits;
RESET bytea_output;

SET client_min_messages = error;
DROP VIEW results_view;
DROP TABLE results_text, results_json, results_any;
DROP TYPE results_mood, results_pair;
DROP DOMAIN results_json_domain, results_jsonb_domain, results_text_domain, results_int_domain;
DROP FUNCTION results_handler, results_destroyer;
TRUNCATE idem_completions;
