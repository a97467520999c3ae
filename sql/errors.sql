--
-- Errors: each with its SQLSTATE, a message that says what is wrong, key and
-- store in the detail, and a hint that says what to do
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
SET timezone = 'UTC';

CREATE SCHEMA "Errors";
SELECT idem_create_store('"Errors"."My Store"');
CREATE FUNCTION errors_catch(query text) RETURNS TABLE (part text, content text) LANGUAGE plpgsql AS $$
DECLARE
	state text;
	message text;
	detail text;
	hint text;
BEGIN
	EXECUTE query;
	RETURN QUERY SELECT 'no error', NULL;
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, message = MESSAGE_TEXT,
		detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RETURN QUERY VALUES (state, message), ('', detail), ('', hint);
END $$;
\pset format unaligned
\pset tuples_only on

-- ID001 to ID004: the states of a key
INSERT INTO "Errors"."My Store" (key, status, lease_until, fingerprint)
VALUES ('done "k"', 'completed', NULL, idem_fingerprint('1')),
	   ('leased', 'leased', '2300-02-03 04:05:06.789+00', NULL),
	   ('leased for good', 'leased', 'infinity', NULL),
	   ('lease over', 'leased', '2020-02-03 04:05:06+00', NULL);
SELECT * FROM errors_catch($$SELECT idem_claim('done "k"', '2', store => '"Errors"."My Store"')$$);
SELECT * FROM errors_catch($$SELECT idem_once('done "k"', '2', store => '"Errors"."My Store"')$$);
SELECT * FROM errors_catch($$SELECT idem_run('done "k"', 'now', '2', store => '"Errors"."My Store"')$$);
SELECT * FROM errors_catch($$SELECT idem_claim('leased', store => '"Errors"."My Store"')$$);
SELECT * FROM errors_catch($$SELECT idem_claim('leased for good', store => '"Errors"."My Store"')$$);
SELECT * FROM errors_catch($$SELECT idem_claim('lease over', store => '"Errors"."My Store"')$$);
SELECT * FROM errors_catch($$SELECT idem_claim('late', first_sent => '2001-01-01 00:00+00', store => '"Errors"."My Store"')$$);

-- ID005: completing what is not claimed
SELECT * FROM errors_catch($$SELECT idem_complete('none')$$);
SELECT * FROM errors_catch($$SELECT idem_complete('none', '1', 5)$$);
SELECT * FROM errors_catch($$SELECT idem_complete('done "k"', '1', store => '"Errors"."My Store"')$$);
BEGIN;
SELECT status FROM idem_claim('twice');
SELECT idem_complete('twice');
SELECT * FROM errors_catch($$SELECT idem_complete('twice')$$);
ROLLBACK;

-- ID006: the transaction ends with a claim
SELECT status FROM idem_claim('unfinished');
SELECT status FROM idem_claim('unfinished', store => '"Errors"."My Store"');
SELECT count(*) FROM idem_claim_batch('{unfinished,unfinished}');
-- ... with many it is said how many
BEGIN;
SELECT count(*) FROM idem_claim_batch('{unfinished_1,unfinished_2,unfinished_3}');
SELECT idem_complete('unfinished_1'), idem_release('unfinished_2');
COMMIT;
\set VERBOSITY terse
SELECT count(*) FROM idem_claim_batch('{unfinished_1,unfinished_2,unfinished_3}');
\set VERBOSITY default

-- Conflicts with rows that were written by hand
BEGIN;
SELECT status FROM idem_claim('by hand');
INSERT INTO idem_completions (key) VALUES ('by hand');
SELECT * FROM errors_catch($$SELECT idem_complete('by hand')$$);
ROLLBACK;

-- Keys
SELECT * FROM errors_catch($$SELECT idem_claim(NULL)$$);
SELECT * FROM errors_catch($$SELECT idem_try_claim(NULL)$$);
SELECT * FROM errors_catch($$SELECT idem_claim('')$$);
SELECT * FROM errors_catch($$SELECT idem_claim(repeat('x', 513))$$);
SELECT * FROM errors_catch($$SELECT idem_claim(repeat(U&'\00e9', 257))$$);
SELECT * FROM errors_catch($$SELECT idem_claim(E'a\tb')$$);
SELECT * FROM errors_catch($$SELECT idem_claim(E'a\177')$$);
SELECT * FROM errors_catch($$SELECT idem_claim_batch('{a,NULL}')$$);
SELECT * FROM errors_catch($$SELECT idem_claim_batch(NULL)$$);
SELECT * FROM errors_catch($$SELECT idem_claim_batch('{a,b}', '{}')$$);
-- ... every function that takes a key
SELECT f, e.part FROM unnest(ARRAY['idem_claim(NULL)', 'idem_try_claim(NULL)', 'idem_once(NULL)',
	'idem_complete(NULL)', 'idem_complete(NULL, 1)', 'idem_release(NULL)', 'idem_lookup(NULL)',
	'idem_forget(NULL)', 'idem_run(NULL, ''now'')', 'idem_claim_batch(ARRAY[NULL])',
	'idem_claim(E''\n'')', 'idem_try_claim(E''\n'')', 'idem_once(E''\n'')',
	'idem_complete(E''\n'')', 'idem_complete(E''\n'', 1)', 'idem_release(E''\n'')', 'idem_lookup(E''\n'')',
	'idem_forget(E''\n'')', 'idem_run(E''\n'', ''now'')', 'idem_claim_batch(ARRAY[E''\n''])']) AS f,
	LATERAL (SELECT * FROM errors_catch('SELECT ' || f) LIMIT 1) AS e;

-- Other arguments
SELECT * FROM errors_catch($$SELECT idem_claim('k', store => NULL)$$);
SELECT * FROM errors_catch($$SELECT idem_claim('k', wait => '-1 s')$$);
SELECT * FROM errors_catch($$SELECT idem_run('k', NULL)$$);
SELECT * FROM errors_catch($$SELECT idem_run('k', 'no_such_handler')$$);
SELECT * FROM errors_catch($$SELECT idem_run('k', 'generate_series(int,int)')$$);
-- ... invalid JSON as a result
BEGIN;
SELECT status FROM idem_claim('json');
SELECT part FROM errors_catch($$SELECT idem_complete('json', '{"a": tru}')$$);
SELECT part FROM errors_catch($$SELECT idem_complete('json', '')$$);
SELECT part FROM errors_catch($$SELECT idem_complete('json', '1 2')$$);
SELECT part FROM errors_catch($$SELECT idem_complete('json', 'abc'::text)$$);
SELECT part FROM errors_catch($$SELECT idem_complete('json', 'abc'::varchar)$$);
SELECT part FROM errors_catch($$SELECT idem_complete('json', E'"\t"')$$);
SELECT status FROM idem_claim('json');
ROLLBACK;

-- Stores
SELECT part FROM errors_catch($$SELECT idem_claim('k', store => 'no_such_store')$$);
SELECT part FROM errors_catch($$SELECT idem_claim('k', store => 0)$$);
SELECT * FROM errors_catch($$SELECT idem_claim('k', store => 'pg_class')$$);
SELECT * FROM errors_catch($$SELECT idem_claim('k', store => 'idem_completions_0')$$);
SELECT * FROM errors_catch($$SELECT idem_create_store(NULL)$$);
SELECT * FROM errors_catch($$SELECT idem_create_store('s', NULL)$$);
SELECT * FROM errors_catch($$SELECT idem_create_store('s', '1 mon')$$);
SELECT * FROM errors_catch($$SELECT idem_create_store('s', '0')$$);
SELECT * FROM errors_catch($$SELECT idem_create_store('s', '1 day', 1)$$);
SELECT * FROM errors_catch($$SELECT idem_create_store('pg_temp.s')$$);
SELECT * FROM errors_catch($$SELECT idem_set_retention('-1 s')$$);
SELECT * FROM errors_catch($$SELECT idem_forget('unfinished') FROM idem_claim('unfinished')$$);

-- Where nothing may be written
BEGIN READ ONLY;
SELECT f, e.part FROM unnest(ARRAY['idem_claim(''k'')', 'idem_try_claim(''k'')', 'idem_once(''k'')',
	'idem_complete(''k'')', 'idem_complete(''k'', 1)', 'idem_release(''k'')', 'idem_lookup(''k'')',
	'idem_forget(''k'')', 'idem_run(''k'', ''now'')', 'idem_claim_batch(''{k}'')',
	'idem_create_store(''k'')', 'idem_set_retention(''1 day'')']) AS f,
	LATERAL (SELECT * FROM errors_catch('SELECT ' || f) LIMIT 1) AS e;
ROLLBACK;

-- The codes can be caught by name of their SQLSTATE
DO $$
BEGIN
	PERFORM idem_claim('done "k"', '2', store => '"Errors"."My Store"');
EXCEPTION
	WHEN SQLSTATE 'ID001' THEN RAISE NOTICE 'key reused';
END $$;

\pset tuples_only off
\pset format aligned
RESET timezone;
SET client_min_messages = error;
DROP FUNCTION errors_catch;
DROP SCHEMA "Errors" CASCADE;
TRUNCATE idem_completions;
