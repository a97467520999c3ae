--
-- Fingerprints of requests
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

SELECT proname, provolatile, proisstrict, proparallel
FROM pg_proc WHERE proname = 'idem_fingerprint';

SELECT idem_fingerprint('{"amount": 4200}');
SELECT idem_fingerprint(NULL) IS NULL AS null_has_none;

-- The specification: UUIDv8 of version 1, SHA-256, and the canonical form
CREATE FUNCTION idem_test_specified(canonical text) RETURNS uuid
LANGUAGE sql IMMUTABLE AS $$
	SELECT encode(set_byte(set_byte(set_byte(substr(digest, 1, 16), 0, 1),
						   6, get_byte(digest, 6) & 15 | 128),
				  8, get_byte(digest, 8) & 63 | 128), 'hex')::uuid
	FROM sha256(convert_to(E'idem fingerprint 1\n' || canonical, 'UTF8')) AS digest
$$;
SELECT request, canonical
FROM (VALUES ('null', 'n'), ('true', 't'), ('false', 'f'), ('""', 's0:'),
	('"hello"', 's5:hello'), ('[]', 'a0:'), ('{}', 'o0:'), ('[[]]', 'a1:a0:'),
	('[{}]', 'a1:o0:'), ('["a","b"]', 'a2:s1:as1:b'), ('["ab"]', 'a1:s2:ab'),
	('[null,true,false]', 'a3:ntf'), ('0', 'd0e0;'), ('-0.00', 'd0e0;'),
	('0e100', 'd0e0;'), ('1', 'd1e0;'), ('10', 'd1e1;'), ('-1.50', 'd-15e-1;'),
	('4200', 'd42e2;'), ('4.2e3', 'd42e2;'), ('10000', 'd1e4;'),
	('100000000', 'd1e8;'), ('0.0001', 'd1e-4;'), ('0.00012', 'd12e-5;'),
	('123456789.0123', 'd1234567890123e-4;'), ('12000.00034', 'd1200000034e-5;'),
	('1533947986218845197', 'd1533947986218845197e0;'),
	('1e-200', 'd1e-200;'), ('1e100000', 'd1e100000;'),
	('1e131071', 'd1e131071;'), ('1e-16383', 'd1e-16383;'),
	('{"b":1,"a":"x"}', 'o2:s1:as1:xs1:bd1e0;'),
	('{"aa":1,"b":2,"":3}', 'o3:s0:d3e0;s1:bd2e0;s2:aad1e0;'),
	('{"a":1,"a":2}', 'o1:s1:ad2e0;'),
	('{"a":{"b":[1,{"c":null}]}}', 'o1:s1:ao1:s1:ba2:d1e0;o1:s1:cn'))
	AS v(request, canonical)
WHERE idem_fingerprint(request::jsonb) IS DISTINCT FROM idem_test_specified(canonical);
SELECT idem_fingerprint('["\u00e9", "e\u0301", "\ud83d\ude00"]') =
	   idem_test_specified(U&'a3:s2:\00E9s3:e\0301s4:\+01F600') AS bytes_of_utf8;
SELECT bool_and(idem_fingerprint(to_jsonb(i))::text ~
				'^01[0-9a-f]{6}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$')
	   AS uuid_of_version_8,
	   count(DISTINCT idem_fingerprint(to_jsonb(i))) AS different
FROM generate_series(-5000, 5000) i;

-- What does not count: member order, white space, escapes, spelling of numbers
SELECT n, count(DISTINCT idem_fingerprint(request::jsonb)) AS fingerprints
FROM (VALUES (1, '{"a": 1, "b": [true, null]}'), (1, '{"b":[true,null],"a":1.0}'),
	(1, E'{\n"b" :\t[ true , null ], "\\u0061":1e0}'),
	(2, '1'), (2, '1.0'), (2, '1e0'), (2, '10e-1'), (2, '0.001E+3'),
	(3, '0'), (3, '-0'), (3, '0.0'), (3, '-0e5'),
	(4, '"/"'), (4, '"\/"'), (4, '"\u002f"'),
	(5, '{"a":1,"a":2}'), (5, '{"a":2}'),
	(6, '1' || repeat('0', 100)), (6, '1e100')) AS v(n, request)
GROUP BY n ORDER BY n;

-- What does count
SELECT count(*), count(DISTINCT idem_fingerprint(request::jsonb))
FROM unnest(ARRAY['null', 'false', 'true', '0', '1', '-1', '""', '"0"', '"1"',
	'"null"', '[]', '{}', '[null]', '[[]]', '[[],[]]', '[[[]]]', '[{}]', '[0]',
	'["a","b"]', '["b","a"]', '["ab"]', '["ab",""]', '["","ab"]', '[["a"],"b"]',
	'[["a","b"]]', '{"a":"b"}', '{"b":"a"}', '{"a":null}', '{"a":[]}', '{"a":{}}',
	'{"a":{},"b":1}', '{"a":{"b":1}}', '{"a":1,"b":2}', '{"a":2,"b":1}',
	'{"":"ab"}', '{"ab":""}', '"a"', '"A"', '"a "', '"\u00e9"', '"e\u0301"',
	'9007199254740992', '9007199254740993', '0.1', '0.10000000000000001',
	'1e100', '1e-100', '"s1:a"', '["s1:a"]', '"\n"', '"\\n"']) AS request;

-- How the value came about does not count
SELECT idem_fingerprint('{"id": 17, "price": 1.10, "tags": ["x"]}') =
	   idem_fingerprint(jsonb_build_object('tags', ARRAY['x'], 'id', 17::bigint,
										   'price', 1.1::float8)) AS built,
	   idem_fingerprint('{"id": 17}') =
	   idem_fingerprint('{"sent_at": "now", "id": 17}'::jsonb - 'sent_at') AS cut;

-- Nor how it is stored: short header, compressed, out of line
CREATE TABLE idem_test_requests (n int, request jsonb);
INSERT INTO idem_test_requests VALUES (1, '{"a": 1.50}'),
	(2, to_jsonb(repeat('compressible', 10000)));
INSERT INTO idem_test_requests
	SELECT 3, jsonb_object_agg(md5(i::text), i) FROM generate_series(1, 3000) i;
SELECT n, idem_fingerprint(request) = idem_fingerprint(request::text::jsonb) AS same
FROM idem_test_requests ORDER BY n;
SELECT idem_fingerprint(request) =
	   (SELECT idem_fingerprint(jsonb_object_agg(md5(i::text), i::numeric(10, 2)))
		FROM generate_series(3000, 1, -1) i) AS any_order
FROM idem_test_requests WHERE n = 3;

-- It can be indexed
CREATE INDEX ON idem_test_requests (idem_fingerprint(request));

-- Large and deep ones
SELECT idem_fingerprint(to_jsonb(repeat('x', 5000000))) =
	   idem_test_specified('s5000000:' || repeat('x', 5000000)) AS long_string,
	   idem_fingerprint(('[' || repeat('1e131071,', 9999) || '-1e131071]')::jsonb) =
	   idem_test_specified('a10000:' || repeat('d1e131071;', 9999) || 'd-1e131071;')
	   AS huge_numbers,
	   idem_fingerprint((repeat('9', 131072))::jsonb) =
	   idem_test_specified('d' || repeat('9', 131072) || 'e0;') AS all_digits,
	   idem_fingerprint((repeat('[', 1000) || repeat(']', 1000))::jsonb) =
	   idem_test_specified(repeat('a1:', 999) || 'a0:') AS deep;
-- What jsonb's parser could nest needs no stack here
INSERT INTO idem_test_requests
	VALUES (4, (repeat('[{"a":', 2000) || 'null' || repeat('}]', 2000))::jsonb);
SET max_stack_depth = '100kB';
SELECT idem_fingerprint(request) =
	   idem_test_specified(repeat('a1:o1:s1:a', 2000) || 'n') AS deeper
FROM idem_test_requests WHERE n = 4;
RESET max_stack_depth;
DROP TABLE idem_test_requests;

-- What jsonb refuses has none
\set VERBOSITY sqlstate
SELECT idem_fingerprint('"\u0000"');
SELECT idem_fingerprint('"\ud83d"');
SELECT idem_fingerprint('NaN');
SELECT idem_fingerprint('1e131072');
\set VERBOSITY default

-- A fingerprint that a later version may have stored is never guessed at
BEGIN;
INSERT INTO idem_completions (key, result, completed_at, fingerprint)
	VALUES ('fp:newer', '1', now(), '02c8192a-d2f2-8577-9195-a9c79f19540a'),
		   ('fp:not one', '2', now(), '01c8192a-d2f2-4577-9195-a9c79f19540a'),
		   ('fp:same', '3', now(), idem_fingerprint('{"amount": 4200}')),
		   ('fp:other', '4', now(), idem_fingerprint('{"amount": 4201}')),
		   ('fp:none', '5', now(), NULL);
SAVEPOINT s;
SELECT * FROM idem_claim('fp:newer', '{"amount": 4200}');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT * FROM idem_claim('fp:not one', '{"amount": 4200}');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT claimed, status, result FROM idem_claim('fp:newer');
SELECT claimed, status, result FROM idem_claim('fp:same', '{"amount": 42e2}');
SELECT claimed, status, result FROM idem_try_claim('fp:other', '{"amount": 4200}');
SELECT claimed, status, result FROM idem_claim('fp:none', '{"amount": 4200}');
ROLLBACK;

DROP FUNCTION idem_test_specified(text);
