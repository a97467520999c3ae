--
-- Keys: idem_key(), idem_provider_key(), the rules of a key, and its lock
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

SELECT proname, provolatile, proisstrict, proparallel
FROM pg_proc WHERE proname IN ('idem_key', 'idem_provider_key') ORDER BY 1;

-- Parts of every type; the type does not matter, only its text
CREATE TYPE idem_test_step AS ENUM ('collect', 're:fund');
CREATE DOMAIN idem_test_name AS text;
CREATE DOMAIN idem_test_domain AS idem_test_step;
SELECT idem_key('invoice', 'inv_2048', 'collect');
SELECT idem_key('a'::text, 'b'::varchar, 'c'::varchar(10), 1::smallint, -2,
				9223372036854775807, true, false,
				'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'::uuid,
				'collect'::idem_test_step, 'd'::idem_test_name,
				're:fund'::idem_test_domain);
SELECT idem_key('invoice', 1) = idem_key('invoice'::varchar, '1') AS same,
	   idem_key('invoice', true) = idem_key('invoice', 'true') AS same;

-- An array gives its elements as parts
SELECT idem_key(VARIADIC ARRAY['invoice', 'a:b']),
	   idem_key(VARIADIC ARRAY[1, 2, 3]),
	   idem_key(VARIADIC ARRAY['collect', 're:fund']::idem_test_step[]),
	   idem_key(VARIADIC ARRAY[['a', 'b'], ['c', 'd']]);

-- Different lists of parts never give the same key
WITH parts(list) AS (
	VALUES (ARRAY['a', 'b']), ('{ab}'), ('{a:b}'), ('{a,:b}'), ('{a:,b}'),
		('{a%3Ab}'), ('{a%253Ab}'), ('{a%,3Ab}'), ('{:}'), ('{:,:}'), ('{::}'),
		('{:::}'), ('{%}'), ('{%25}'), ('{%3A}'), ('{a,b,c}'), ('{a,b:c}'),
		('{a:b,c}'), ('{a:b:c}'), ('{A,b}'), ('{a,"b "}'), ('{a," b"}'),
		(ARRAY[repeat('a', 512)]), (ARRAY[repeat('a', 513)]),
		(ARRAY[repeat('a', 514)]), (ARRAY[repeat('a', 513) || 'b']),
		(ARRAY[repeat('a', 300), repeat('a', 300)]),
		(ARRAY[repeat('a', 300) || ':' || repeat('a', 300)]),
		(ARRAY[idem_key(repeat('a', 513))]),
		(ARRAY[U&'caf\00E9']), (ARRAY[U&'cafe\0301'])
)
SELECT count(*) = count(DISTINCT idem_key(VARIADIC list) COLLATE "C") AS all_differ,
	   bool_and(octet_length(idem_key(VARIADIC list)) BETWEEN 1 AND 512) AS all_fit,
	   count(*)
FROM parts;

-- Long keys: a readable prefix, cut between characters, and a hash of the whole
SELECT octet_length(idem_key(repeat('x', 512))) AS kept,
	   octet_length(idem_key(repeat('x', 513))) AS shortened,
	   octet_length(idem_key(repeat(':', 171))) AS shortened,
	   octet_length(idem_key(repeat('x', 10000000))) AS shortened;
SELECT idem_key('tenant:7', repeat('x', 600));
SELECT idem_key('tenant:7', repeat('x', 600)) =
	   left('tenant%3A7:' || repeat('x', 600), 128) || '%sha256=' ||
	   encode(sha256(convert_to('tenant%3A7:' || repeat('x', 600), 'UTF8')), 'hex')
	   AS as_specified;
SELECT n, split_part(key, '%sha256=', 1) = repeat('x', n) || repeat(U&'\+01F600', chars)
	   AS prefix_as_expected
FROM (VALUES (124, 1), (125, 0), (126, 0), (127, 0), (128, 0)) AS v(n, chars),
	 idem_key(repeat('x', n) || repeat(U&'\+01F600', 200)) AS key;

-- As stored: short header, compressed, out of line
CREATE TABLE idem_test_parts (n int, part text);
INSERT INTO idem_test_parts VALUES (1, 'short'), (2, repeat('compressible', 10000));
INSERT INTO idem_test_parts
	SELECT 3, string_agg(md5(i::text), '') FROM generate_series(1, 3000) i;
SELECT n, idem_key('p', part) = idem_key('p', part || '') AS same,
	   octet_length(idem_key('p', part))
FROM idem_test_parts ORDER BY n;
DROP TABLE idem_test_parts;

-- It can be used where an expression has to be immutable
CREATE TABLE idem_test_generated (
	id int,
	key text COLLATE "C" GENERATED ALWAYS AS (idem_key('invoice', id)) STORED);
INSERT INTO idem_test_generated VALUES (17);
SELECT * FROM idem_test_generated;
DROP TABLE idem_test_generated;

-- What cannot be a part
SELECT idem_key(VARIADIC '{}'::text[]);
\echo :SQLSTATE
SELECT idem_key(VARIADIC NULL::text[]);
\echo :SQLSTATE
SELECT idem_key('a', NULL);
\echo :SQLSTATE
SELECT idem_key(VARIADIC ARRAY['a', NULL]);
\echo :SQLSTATE
SELECT idem_key('a', '');
\echo :SQLSTATE
SELECT idem_key('a', 1.5);
\echo :SQLSTATE
SELECT idem_key('a', ARRAY['b']);
\echo :SQLSTATE
SELECT idem_key(E'a\nb');
\echo :SQLSTATE
\set VERBOSITY sqlstate
SELECT idem_key();
SELECT idem_key('a', 'b'::char(3));
SELECT idem_key('a', 'b'::name);
SELECT idem_key('a', 1.5::float8);
SELECT idem_key('a', timestamptz '2026-01-01 00:00+00');
SELECT idem_key('a', '{}'::jsonb);
SELECT idem_key('a', '\x00'::bytea);
SELECT idem_key('a', ROW(1));
SELECT idem_key(repeat('x', 600), E'\x1f');
SELECT idem_key(E'\x7f');
SELECT idem_key(U&'a\0080');
SELECT idem_key(U&'a\009F');
\set VERBOSITY default
SELECT octet_length(idem_key(U&'a\00A0')) AS no_break_space_is_none;

-- The identity to hand to a destination
SELECT idem_provider_key('invoice:inv_2048:collect:v1'),
	   idem_provider_key('invoice:inv_2048:collect:v1', 'stripe');
SELECT idem_provider_key('k') = idem_provider_key('k', '') AS default_is_empty,
	   idem_provider_key('ab', 'c') = idem_provider_key('b', 'ca') AS collides;
-- RFC 9562, version 5: SHA-1 is not in SQL, but what it leaves visible is
SELECT bool_and(idem_provider_key('k' || i)::text ~
				'^[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$')
	   AS version_5,
	   count(DISTINCT idem_provider_key('k' || i)) AS different
FROM generate_series(1, 1000) i;
SELECT idem_provider_key(NULL);
\echo :SQLSTATE
SELECT idem_provider_key('k', NULL);
\echo :SQLSTATE
SELECT idem_provider_key('');
\echo :SQLSTATE
SELECT idem_provider_key(repeat('x', 513));
\echo :SQLSTATE
SELECT idem_provider_key(E'a\tb');
\echo :SQLSTATE
SELECT idem_provider_key(U&'a\0085');
\echo :SQLSTATE
SELECT idem_provider_key('k', E'a\x1fb');
\echo :SQLSTATE
\set VERBOSITY sqlstate
SELECT idem_provider_key('k', repeat('x', 513));
\set VERBOSITY default

-- The same rules hold for a claim, before any lock
BEGIN;
SAVEPOINT s;
SELECT * FROM idem_claim(NULL);
\echo :SQLSTATE
ROLLBACK TO s;
SELECT * FROM idem_claim('');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT * FROM idem_claim(repeat('x', 513));
\echo :SQLSTATE
ROLLBACK TO s;
SELECT * FROM idem_claim(E'a\nb');
\echo :SQLSTATE
ROLLBACK TO s;
SELECT count(*) FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory';

-- Keys are compared byte by byte: these are all different
SELECT n, claimed
FROM (VALUES (1, 'cafe'), (2, 'CAFE'), (3, 'cafe '), (4, ' cafe'),
			 (5, U&'caf\00E9'), (6, U&'cafe\0301'), (7, U&'cafe\00A0'),
			 (8, repeat('x', 512)), (9, repeat('x', 511))) AS k(n, key),
	 idem_claim(key)
ORDER BY n;

-- What stands for them are locks made of a hash of store and key
SELECT count(*), bool_and(mode = 'ExclusiveLock') AS exclusive,
	   bool_and((classid::int8 << 32 | objid::int8) IN (
			SELECT hashtextextended(key COLLATE "C", 'idem_completions'::regclass::oid::int8)
			FROM (VALUES ('cafe'), ('CAFE'), ('cafe '), (' cafe'),
						 (U&'caf\00E9'), (U&'cafe\0301'), (U&'cafe\00A0'),
						 (repeat('x', 512)), (repeat('x', 511))) AS k(key)))
	   AS as_specified
FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = x'4944'::int;
ROLLBACK;

DROP DOMAIN idem_test_domain, idem_test_name;
DROP TYPE idem_test_step;
