--
-- Leases: effects outside the database, as far as one session can see them.
-- Time is made to pass by moving the times of a record into the past.
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

CREATE SCHEMA lease_test;
SET search_path = lease_test, public;
CREATE FUNCTION pass(passed text, by interval DEFAULT '1 hour') RETURNS void LANGUAGE sql AS $$
	UPDATE idem_completions SET lease_until = lease_until - by, claimed_at = claimed_at - by WHERE key = passed
$$;
-- What a call answers, or its error; whatever it did is undone
CREATE FUNCTION try(call text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text;
BEGIN
	EXECUTE 'SELECT ' || call INTO answer;
	RAISE EXCEPTION USING ERRCODE = 'UNDO0', MESSAGE = coalesce(answer, 'NULL');
EXCEPTION
	WHEN SQLSTATE 'UNDO0' THEN RETURN SQLERRM;
	WHEN OTHERS THEN RETURN SQLSTATE;
END $$;
CREATE VIEW record AS
	SELECT key, status, attempts AS leases, token IS NOT NULL AS token, lease_until > clock_timestamp() AS running,
		fingerprint = idem_fingerprint('{"to": "ann"}') AS request, checkpoint, result::text, completed_at IS NOT NULL AS final
	FROM idem_completions ORDER BY key;

SELECT proname, proargnames, provolatile, proisstrict, proparallel, prorettype::regtype
FROM pg_proc WHERE proname ~ '^idem_((try_)?lease|checkpoint|extend|resolve|uncertain_records)$' ORDER BY 1, oid;

-- Take, perform the effect, complete; then every claim and lease is a replay
SELECT claimed, status, result, completed_at, token > 0 AS token, lease_until - now() BETWEEN '4 min' AND '6 min' AS five_minutes, checkpoint
FROM idem_lease('mail:1', '{"to": "ann"}');
SELECT * FROM record;
SELECT token AS token FROM idem_lookup('mail:1') \gset
SELECT claimed_at BETWEEN now() - interval '1 min' AND now() AS claimed_at, claimed_by::json ->> 'user' = session_user AS by_user,
	claimed_by::json ->> 'application' = current_setting('application_name') AS application,
	(claimed_by::json ->> 'pid')::int = pg_backend_pid() AS pid
FROM idem_lookup('mail:1');
SELECT idem_provider_key('mail:1'), idem_provider_key('mail:1', 'smtp');
SELECT idem_complete('mail:1', '{"id": 1.10}', :token);
SELECT * FROM record;
SELECT claimed, status, result, completed_at IS NOT NULL AS completed_at, token, lease_until, checkpoint FROM idem_lease('mail:1', '{"to": "ann"}');
SELECT claimed, status, result, completed_at IS NOT NULL AS completed_at, token, lease_until, checkpoint FROM idem_try_lease('mail:1');
SELECT claimed, status, result, completed_at IS NOT NULL AS completed_at, token, lease_until, checkpoint FROM idem_claim('mail:1', '{"to": "ann"}');
SELECT idem_once('mail:1');
-- ... and such a replay is a read
BEGIN;
SELECT status FROM idem_lease('mail:1');
SELECT status FROM idem_try_lease('mail:1');
SELECT pg_current_xact_id_if_assigned() IS NULL AS still_a_read;
SELECT count(*) AS key_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
COMMIT;
-- ... of a lease that runs: its end is told, its token is not
SELECT claimed, token AS token FROM idem_lease('mail:2') \gset
SELECT claimed, status, result, completed_at, token, lease_until > now() AS until, checkpoint FROM idem_try_lease('mail:2');
SELECT claimed, status, result, completed_at, token, lease_until > now() AS until, checkpoint FROM idem_try_claim('mail:2');
BEGIN;
SELECT status FROM idem_try_lease('mail:2', on_uncertain => 'skip');
SELECT pg_current_xact_id_if_assigned() IS NULL AS still_a_read;
COMMIT;

-- The tables of behaviour, by the state of the key
SELECT claimed FROM idem_lease('state:released', '[1]');
SELECT idem_release('state:released', token) FROM idem_lookup('state:released');
SELECT claimed FROM idem_lease('state:completed', '[1]');
SELECT idem_complete('state:completed', '1', token) FROM idem_lookup('state:completed');
SELECT claimed FROM idem_lease('state:running', '[1]');
SELECT claimed FROM idem_lease('state:over', '[1]');
SELECT pass('state:over');
SELECT claimed FROM idem_lease('state:skipped', '[1]');
SELECT pass('state:skipped');
SELECT claimed, status FROM idem_lease('state:skipped', on_uncertain => 'skip');
CREATE VIEW leases AS SELECT state, request, policy,
		try(format('claimed || '' '' || status FROM idem_lease(%L, %L, on_uncertain => %L)', 'state:' || state, request, policy)) AS lease,
		try(format('claimed || '' '' || status FROM idem_try_lease(%L, %L, on_uncertain => %L)', 'state:' || state, request, policy)) AS try_lease
	FROM unnest('{absent,released,held,completed,skipped,running,over}'::text[]) WITH ORDINALITY AS s(state, n),
		unnest('{NULL,"[1]","[2]"}'::text[]) AS r(request), unnest('{reconcile,retry,skip}'::text[]) AS p(policy)
	ORDER BY n, request NULLS FIRST, policy;
BEGIN;
SELECT claimed FROM idem_claim('state:held', '[1]');
SELECT * FROM leases;
SELECT idem_release('state:held');
COMMIT;
CREATE FUNCTION handler() RETURNS int LANGUAGE sql AS 'SELECT 1';
SELECT state, request,
	try(format('claimed || '' '' || status FROM idem_claim(%L, %L)', 'state:' || state, request)) AS claim,
	try(format('claimed || '' '' || status FROM idem_try_claim(%L, %L)', 'state:' || state, request)) AS try_claim,
	try(format('claimed || '' '' || status FROM idem_claim_batch(ARRAY[%L], ARRAY[%L]::jsonb[])', 'state:' || state, request)) AS batch,
	try(format('idem_once(%L, %L)', 'state:' || state, request)) AS once,
	try(format('claimed || '' '' || status FROM idem_run(%L, ''handler'', %L)', 'state:' || state, request)) AS run
FROM unnest('{released,completed,skipped,running,over}'::text[]) WITH ORDINALITY AS s(state, n),
	unnest('{NULL,"[1]","[2]"}'::text[]) AS r(request)
ORDER BY n, request NULLS FIRST;
SELECT state, try(format('idem_complete(%L, ''1'', token) FROM idem_lookup(%1$L)', 'state:' || state)) AS complete,
	try(format('idem_complete(%L, ''2'', token) FROM idem_lookup(%1$L)', 'state:' || state)) AS other_result,
	try(format('idem_complete(%L, ''1'', token - 1) FROM idem_lookup(%1$L)', 'state:' || state)) AS other_token,
	try(format('idem_complete(%L, ''1'')', 'state:' || state)) AS no_token,
	try(format('idem_checkpoint(%L, token, ''1'') FROM idem_lookup(%1$L)', 'state:' || state)) AS checkpoint,
	try(format('idem_extend(%L, token, ''1 h'') > now() FROM idem_lookup(%1$L)', 'state:' || state)) AS extend,
	try(format('idem_release(%L, token) FROM idem_lookup(%1$L)', 'state:' || state)) AS release,
	try(format('idem_release(%L, token - 1) FROM idem_lookup(%1$L)', 'state:' || state)) AS other_token,
	try(format('idem_release(%L)', 'state:' || state)) AS no_token,
	try(format('status FROM idem_resolve(%L, true, ''1'')', 'state:' || state)) AS happened,
	try(format('status FROM idem_resolve(%L, false)', 'state:' || state)) AS not_happened,
	try(format('idem_forget(%L)', 'state:' || state)) AS forget
FROM unnest('{released,completed,skipped,running,over}'::text[]) WITH ORDINALITY AS s(state, n) ORDER BY n;
-- ... all of which was undone
SELECT key, status, leases, running FROM record WHERE key LIKE 'state:%';
-- ... of a key that is not there
SELECT try($$idem_complete('state:absent', '1', 1)$$), try($$idem_checkpoint('state:absent', 1, '1')$$), try($$idem_extend('state:absent', 1, '1 h')$$),
	try($$idem_release('state:absent', 1)$$), try($$idem_resolve('state:absent', true)$$), try($$idem_resolve('state:absent', false)$$);

-- The messages
\set VERBOSITY default
\set SHOW_CONTEXT never
SELECT idem_lease('state:over');
SELECT idem_lease('state:over', '[2]');
SELECT idem_complete('state:over', '1', 0);
SELECT idem_complete('state:completed', '{"other": 1}', token) FROM idem_lookup('state:completed');
SELECT idem_complete('state:completed', NULL, token) FROM idem_lookup('state:completed');
SELECT idem_resolve('state:completed', true);
SELECT idem_resolve('state:over', false, '1');
SELECT idem_lease('state:absent', on_uncertain => 'Retry');
SELECT idem_lease('state:absent', lease => '0');
UPDATE idem_completions SET lease_until = '2999-12-31 23:59:59.5-08' WHERE key = 'state:running';
SELECT idem_lease('state:running');
SELECT idem_claim('state:running');
SELECT idem_resolve('state:running', false);
\set VERBOSITY sqlstate

-- Arguments and bounds
SELECT lease, try(format('status FROM idem_lease(''arg'', lease => %L)', lease)) AS lease, try(format('status FROM idem_try_lease(''arg'', lease => %L)', lease)) AS try_lease,
	try(format('idem_extend(''state:over'', token, %L) > now() FROM idem_lookup(''state:over'')', lease)) AS extend
FROM unnest('{NULL,0,-1 ms,999 us,1 ms,30 days,720 hours,1 month,30 days 1 us,31 days,-1 month 31 days,-1 month 30 days,1000000 years}'::interval[]) AS lease;
SELECT policy, try(format('status FROM idem_lease(''arg'', on_uncertain => %L)', policy)), try(format('status FROM idem_try_lease(''arg'', on_uncertain => %L)', policy))
FROM unnest('{NULL,"",retry,Retry," retry",reconcile,skip,claim}'::text[]) AS policy;
SELECT w, try(format('status FROM idem_lease(''arg'', retry_window => %L)', w)) FROM unnest('{NULL,0,-1 us,1 us,100 years}'::interval[]) AS w;
SELECT length(key) AS length, try(format('idem_lease(%L)', key)) AS lease, try(format('idem_try_lease(%L)', key)) AS try_lease, try(format('idem_checkpoint(%L, 1, ''1'')', key)) AS checkpoint,
	try(format('idem_extend(%L, 1, ''1 h'')', key)) AS extend, try(format('idem_complete(%L, ''1'', 1)', key)) AS complete, try(format('idem_release(%L, 1)', key)) AS release,
	try(format('idem_resolve(%L, true)', key)) AS resolve
FROM unnest(ARRAY[NULL, '', repeat('x', 513), E'a\nb']) AS key;
SELECT try($$idem_checkpoint('arg', NULL, '1')$$), try($$idem_extend('arg', NULL, '1 h')$$), try($$idem_resolve('arg', NULL)$$), try($$idem_resolve('arg', NULL, 1)$$),
	try($$idem_resolve('state:over', false, '1')$$), try($$idem_resolve('state:over', false, 1)$$), try($$status FROM idem_resolve('state:over', false, NULL::int)$$),
	try($$idem_resolve('state:over', true, '{')$$), try($$idem_complete('state:over', '{', 1)$$);
SELECT call, try(call) FROM unnest(ARRAY[
	$$idem_lease('arg', store => NULL)$$, $$idem_try_lease('arg', store => 'pg_class')$$, $$idem_checkpoint('arg', 1, '1', NULL)$$, $$idem_extend('arg', 1, '1 h', 'record')$$,
	$$idem_resolve('arg', true, store => NULL)$$, $$idem_resolve('arg', true, 1, 'idem_completions_0')$$, $$idem_complete('arg', '1', 1, 'pg_class')$$, $$idem_release('arg', 1, 'pg_class')$$]) AS call;
-- ... in read-only transactions and where maintenance evaluates
SELECT call, try(call) FROM unnest(ARRAY[
	$$idem_lease('state:completed')$$, $$idem_try_lease('state:completed')$$, $$idem_checkpoint('state:over', 1, '1')$$, $$idem_extend('state:over', 1, '1 h')$$,
	$$idem_resolve('state:over', true)$$, $$idem_resolve('state:over', true, 1)$$, $$idem_complete('state:over', '1', 1)$$, $$idem_release('state:over', 1)$$,
	$$count(*) FROM idem_uncertain WHERE key = 'state:over'$$]) AS call, set_config('transaction_read_only', 'on', true);
CREATE FUNCTION lease_in_index(k text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN RETURN (public.idem_lease(k)).status; END $$;
CREATE TABLE indexed AS SELECT 'index'::text AS k;
CREATE INDEX ON indexed (lease_test.lease_in_index(k));

-- A retry: a new token, its checkpoint, one more attempt
SELECT claimed, token AS token1 FROM idem_lease('retry', '{"to": "ann"}', on_uncertain => 'retry') \gset
SELECT idem_checkpoint('retry', :token1, '{"step":  "charged"}');
SELECT pass('retry', '30 min');
SELECT claimed, status, token, lease_until < now() AS over, checkpoint FROM idem_try_lease('retry');
SELECT claimed, status, result, completed_at, token > :token1 AS new_token, lease_until > now() AS running, checkpoint
FROM idem_lease('retry', on_uncertain => 'retry');
SELECT token AS token2 FROM idem_lookup('retry') \gset
SELECT * FROM record WHERE key = 'retry';
SELECT now() - claimed_at BETWEEN '29 min' AND '31 min' AS since_the_first FROM idem_lookup('retry');
-- ... the superseded token gets ID005 whatever it tries, and changes nothing
SELECT idem_complete('retry', '1', :token1);
SELECT idem_checkpoint('retry', :token1, '{}');
SELECT idem_extend('retry', :token1, '1 h');
SELECT idem_release('retry', :token1);
SELECT * FROM record WHERE key = 'retry';
-- ... until the time of the destination's memory, counted from the first lease, has passed
SELECT pass('retry', '20 min');
SELECT w AS retry_window, try(format('status || '' '' || claimed || coalesce('' '' || checkpoint::text, '''') FROM idem_lease(''retry'', on_uncertain => ''retry'', retry_window => %L)', w)) AS lease,
	try(format('status || '' '' || claimed FROM idem_try_lease(''retry'', on_uncertain => ''retry'', retry_window => %L)', w)) AS try_lease
FROM unnest('{0,49 min,51 min,100 years,NULL}'::interval[]) AS w;
SELECT try($$status FROM idem_try_lease('retry', on_uncertain => 'skip', retry_window => '1 min')$$), try($$status FROM idem_try_lease('retry', on_uncertain => 'reconcile', retry_window => '1 year')$$);
-- ... extending does not make it longer, releasing starts anew
SELECT idem_extend('retry', :token2, '1 ms') > now();
SELECT pass('retry', '1 s');
SELECT try($$idem_lease('retry', on_uncertain => 'retry', retry_window => '49 min')$$), try($$claimed FROM idem_lease('retry', on_uncertain => 'retry', retry_window => '51 min')$$);
SELECT idem_release('retry', :token2);
SELECT * FROM record WHERE key = 'retry';
SELECT claimed, token > :token2 AS new_token, checkpoint FROM idem_lease('retry', '{"to": "bob"}', on_uncertain => 'retry');
SELECT * FROM record WHERE key = 'retry';
SELECT pass('retry', '30 min');
SELECT try($$claimed FROM idem_lease('retry', on_uncertain => 'retry', retry_window => '31 min')$$), try($$claimed FROM idem_lease('retry', '{"to": "ann"}', on_uncertain => 'retry')$$);
-- ... a first lease that is noted as of the future proves nothing: the clock was set back
INSERT INTO idem_completions (key, status, lease_until, claimed_at) VALUES ('clock:future', 'leased', '2000-01-01', now() + interval '1 day'),
	('clock:infinity', 'leased', '2000-01-01', 'infinity'), ('clock:-infinity', 'leased', '2000-01-01', '-infinity'), ('clock:null', 'leased', '2000-01-01', NULL);
SELECT key, try(format('status FROM idem_try_lease(%L, on_uncertain => ''retry'', retry_window => ''1 year'')', key)) AS window, try(format('status FROM idem_try_lease(%L, on_uncertain => ''retry'')', key)) AS no_limit
FROM idem_completions WHERE key LIKE 'clock:%' ORDER BY key;
DELETE FROM idem_completions WHERE key LIKE 'clock:%';

-- A lease that has run out and that nobody has taken over is still held
SELECT claimed, token AS token FROM idem_lease('slow') \gset
SELECT pass('slow');
SELECT idem_checkpoint('slow', :token, '{"step": 1}');
SELECT idem_extend('slow', :token, '1 min') - now() BETWEEN '50 s' AND '70 s' AS extended;
SELECT claimed, status FROM idem_try_lease('slow', on_uncertain => 'retry');
SELECT idem_extend('slow', :token, '1 ms') < now() + interval '1 s' AS shortened;
SELECT pass('slow');
SELECT idem_complete('slow', '"late"', :token);
SELECT * FROM record WHERE key = 'slow';

-- Checkpoints
SELECT claimed, token AS token FROM idem_lease('steps') \gset
SELECT idem_checkpoint('steps', :token, '{"b": 1.10, "a": [1, null]}');
SELECT checkpoint FROM idem_lookup('steps');
SELECT idem_checkpoint('steps', :token, 'null');
SELECT checkpoint, checkpoint IS NULL AS is_null FROM idem_lookup('steps');
SELECT idem_checkpoint('steps', :token, NULL);
SELECT checkpoint, checkpoint IS NULL AS is_null FROM idem_lookup('steps');
SELECT length(idem_checkpoint('steps', :token, to_jsonb(repeat('x', 100000)))::text);
SELECT idem_release('steps', :token);
SELECT claimed, length(checkpoint::text) FROM idem_lease('steps');
SELECT length(checkpoint::text) FROM idem_lookup('steps');
SELECT idem_complete('steps', to_json(repeat('y', 100000)), token) IS NOT NULL FROM idem_lookup('steps');
SELECT status, length(result::text) FROM idem_claim('steps');

-- Completing twice: the acknowledgement was lost
SELECT claimed, token AS token FROM idem_lease('twice') \gset
SELECT idem_complete('twice', '{"b": 1.10}', :token);
SELECT completed_at AS completed_at FROM idem_lookup('twice') \gset
SELECT idem_complete('twice', '{"b": 1.10}', :token);
SELECT idem_complete('twice', '{"b": 1.10}'::json, :token);
SELECT idem_complete('twice', '{"b": 1.1}', :token);
SELECT idem_complete('twice', '{"b": 1.10}'::jsonb, :token);
SELECT idem_complete('twice', NULL, :token);
SELECT idem_complete('twice', '{"b": 1.10}', :token - 1);
SELECT idem_complete('twice', '{"b": 1.10}');
SELECT completed_at = :'completed_at' AS unchanged, result::text FROM idem_lookup('twice');
SELECT claimed, token AS token FROM idem_lease('twice:null') \gset
SELECT idem_complete('twice:null', token => :token) IS NULL, idem_complete('twice:null', token => :token) IS NULL;
SELECT idem_complete('twice:null', '1', :token);
BEGIN;
SELECT claimed, token AS token FROM idem_lease('twice:here') \gset
COMMIT;
BEGIN;
SELECT idem_complete('twice:here', '1', :token);
SELECT idem_complete('twice:here', '1', :token);
SELECT claimed, status, result FROM idem_claim('twice:here');
SELECT claimed, status, result FROM idem_lease('twice:here');
COMMIT;

-- Not in the transaction that took the lease: one that a framework keeps open
-- around everything finds out at once
BEGIN;
SELECT claimed, token AS token FROM idem_lease('wrapped') \gset
SELECT try(format($$idem_complete('wrapped', '1', %L)$$, :'token')) AS complete, try(format($$idem_extend('wrapped', %L, '1 h')$$, :'token')) AS extend,
	try(format($$idem_checkpoint('wrapped', %L, '1')$$, :'token')) AS checkpoint, try($$status FROM idem_claim('wrapped')$$) AS claim,
	try($$status FROM idem_lease('wrapped')$$) AS lease, try($$status FROM idem_try_lease('wrapped')$$) AS try_lease,
	try($$idem_resolve('wrapped', true)$$) AS resolve, try(format($$idem_release('wrapped', %L)$$, :'token')) AS release;
SELECT idem_complete('wrapped', '1', :token);
COMMIT;
SELECT count(*) FROM idem_lookup('wrapped');
SELECT claimed, token AS token2 FROM idem_lease('wrapped') \gset
SELECT :token2 > :token AS new_token;
-- ... neither if it is over by then
BEGIN;
SELECT claimed, token AS token FROM idem_lease('wrapped:over', lease => '1 ms') \gset
SELECT pass('wrapped:over');
SELECT try(format($$idem_complete('wrapped:over', '1', %L)$$, :'token')) AS complete, try(format($$idem_extend('wrapped:over', %L, '1 h')$$, :'token')) AS extend,
	try($$status FROM idem_resolve('wrapped:over', true)$$) AS resolve, try($$status FROM idem_try_lease('wrapped:over')$$) AS try_lease;
COMMIT;
SELECT try(format($$idem_complete('wrapped:over', '1', %L)$$, :'token')) AS complete;
-- ... taken over in this transaction
BEGIN;
SELECT claimed, token AS token2 FROM idem_lease('wrapped:over', on_uncertain => 'retry') \gset
SELECT try(format($$idem_complete('wrapped:over', '1', %L)$$, :'token')) AS old_token, try(format($$idem_complete('wrapped:over', '1', %L)$$, :'token2')) AS new_token;
ROLLBACK;
SELECT idem_complete('wrapped:over', '1', :token);
-- ... work that is prepared commits with the lease, or not at all
CREATE TABLE outbox (key text);
BEGIN;
INSERT INTO outbox VALUES ('prepared');
SELECT claimed FROM idem_lease('prepared');
COMMIT;
BEGIN;
INSERT INTO outbox VALUES ('undone');
SELECT claimed FROM idem_lease('undone');
ROLLBACK;
SELECT * FROM outbox;
SELECT key, status FROM record WHERE key IN ('prepared', 'undone');
-- ... releasing it there is giving it up; then the key is free, for a claim as well
BEGIN;
SELECT claimed, token AS token FROM idem_lease('given_up', '[1]') \gset
SELECT idem_release('given_up', :token), idem_release('given_up', :token);
SELECT claimed, status FROM idem_claim('given_up', '[2]');
SELECT claimed, status FROM idem_lease('given_up', '[2]');
SELECT idem_complete('given_up', '"claim"', :token);
ROLLBACK;
BEGIN;
SELECT claimed, token AS token FROM idem_lease('given_up', '[1]') \gset
SELECT idem_release('given_up', :token);
SELECT claimed, token AS token2 FROM idem_lease('given_up', '[2]') \gset
SELECT try(format($$idem_complete('given_up', '1', %L)$$, :'token')) AS old_token, try(format($$idem_complete('given_up', '1', %L)$$, :'token2')) AS new_token;
COMMIT;
SELECT idem_complete('given_up', '"second"', :token2);

-- Savepoints
BEGIN;
SAVEPOINT a;
SELECT claimed, token AS token FROM idem_lease('savepoint') \gset
SAVEPOINT b;
SELECT idem_release('savepoint', :token);
ROLLBACK TO b;
SELECT try(format($$idem_complete('savepoint', '1', %L)$$, :'token')) AS not_committed;
RELEASE a;
SELECT try(format($$idem_complete('savepoint', '1', %L)$$, :'token')) AS not_committed;
SAVEPOINT a;
SELECT claimed, token AS token_a FROM idem_lease('savepoint:a') \gset
ROLLBACK TO a;
SELECT idem_complete('savepoint:a', '1', :token_a);
ROLLBACK TO a;
SELECT claimed, status FROM idem_claim('savepoint:a');
SELECT idem_complete('savepoint:a', '"claim"');
COMMIT;
SELECT key, status, result FROM record WHERE key LIKE 'savepoint%';
BEGIN;
SAVEPOINT a;
SELECT idem_complete('savepoint', '"undone"', :token);
ROLLBACK TO a;
SELECT idem_checkpoint('savepoint', :token, '"undone"');
SELECT idem_extend('savepoint', :token, '30 days') > now() + interval '29 days';
ROLLBACK TO a;
SELECT status, checkpoint, lease_until < now() + interval '1 day' AS as_before FROM idem_lookup('savepoint');
SELECT idem_extend('savepoint', :token, '1 ms') IS NOT NULL;
RELEASE a;
SELECT pass('savepoint');
SAVEPOINT a;
SELECT claimed, token AS token_a FROM idem_lease('savepoint', on_uncertain => 'retry') \gset
ROLLBACK TO a;
SELECT idem_complete('savepoint', '"first"', :token);
COMMIT;
SELECT key, status, result FROM record WHERE key = 'savepoint';

-- The two ways on one key do not fall over to one another
BEGIN;
SELECT claimed FROM idem_claim('ways');
SELECT claimed, status FROM idem_lease('ways');
SELECT try($$idem_complete('ways', '1', 1)$$), try($$idem_release('ways', 1)$$), try($$idem_extend('ways', 1, '1 h')$$), try($$idem_checkpoint('ways', 1, '1')$$), try($$idem_resolve('ways', true)$$);
SELECT idem_complete('ways', '"claim"');
SELECT try($$idem_complete('ways', '"claim"', 1)$$), try($$claimed || status FROM idem_lease('ways')$$);
ROLLBACK;
SELECT claimed, token AS token FROM idem_lease('ways') \gset
SELECT idem_release('ways');
SELECT idem_complete('ways', '"claim"');
SELECT idem_release('ways', :token);
BEGIN;
SELECT claimed, status FROM idem_claim('ways');
SELECT idem_complete('ways', '"claim"', :token);
ROLLBACK;
BEGIN;
SELECT claimed, status FROM idem_claim('ways');
SELECT idem_complete('ways', '"claim"');
COMMIT;
SELECT idem_complete('ways', '"claim"', :token);
SELECT * FROM record WHERE key = 'ways';
-- ... a forgotten lease is superseded by whatever comes next
SELECT claimed, token AS token FROM idem_lease('forgotten') \gset
SELECT idem_forget('forgotten');
SELECT idem_complete('forgotten', '1', :token);
SELECT claimed, token AS token2 FROM idem_lease('forgotten') \gset
SELECT :token2 > :token AS new_token;
SELECT idem_complete('forgotten', '1', :token);
SELECT idem_complete('forgotten', '1', :token2);
-- ... also in the transaction that took it
BEGIN;
SELECT claimed, token AS token FROM idem_lease('forgotten:here') \gset
SELECT idem_forget('forgotten:here');
SELECT claimed, status FROM idem_claim('forgotten:here');
SELECT idem_complete('forgotten:here');
COMMIT;

-- Skipped, for good
SELECT claimed, token AS token FROM idem_lease('skip', '[1]') \gset
SELECT pass('skip');
SELECT claimed, status, result, completed_at IS NOT NULL AS completed_at, token, lease_until, checkpoint FROM idem_lease('skip', on_uncertain => 'skip');
SELECT idem_complete('skip', '1', :token);
SELECT try($$claimed || status FROM idem_lease('skip', on_uncertain => 'retry')$$), try($$status FROM idem_resolve('skip', true)$$), try(format('idem_extend(%L, %L, %L)', 'skip', :'token', '1 h'));
SELECT key, status, result, final FROM record WHERE key = 'skip';

-- Decisions
SELECT key, claimed FROM unnest('{yes,no,none,any,slow}'::text[]) AS key, idem_lease('resolve:' || key, '[1]');
SELECT idem_checkpoint('resolve:yes', token, '"c"') FROM idem_lookup('resolve:yes');
SELECT idem_resolve('resolve:yes', true, '{"a": 1.10}');
SELECT count(*) FROM unnest('{yes,no,none,any,slow}'::text[]) AS key, pass('resolve:' || key);
SELECT token AS token FROM idem_lookup('resolve:yes') \gset
SELECT key, status, attempts, token = :token AS token, completed_at IS NOT NULL AS completed_at, lease_until, checkpoint, result::text, fingerprint IS NOT NULL AS fingerprint
FROM idem_resolve('resolve:yes', true, '{"a": 1.10}');
SELECT key, status, completed_at IS NOT NULL AS completed_at, lease_until, checkpoint, result::text, fingerprint IS NOT NULL AS fingerprint FROM idem_resolve('resolve:no', false);
SELECT key, status, result FROM idem_resolve('resolve:none', true);
SELECT key, status, result FROM idem_resolve('resolve:any', true, ARRAY[1, 2]);
SELECT claimed, status, result FROM idem_lease('resolve:yes', '[1]');
SELECT idem_resolve('resolve:yes', true, '{"a": 1.10}');
SELECT idem_resolve('resolve:no', false);
-- ... the one that was slow learns of it
SELECT idem_complete('resolve:yes', '{"a": 1.10}', :token);
SELECT idem_complete('resolve:yes', '"slow"', :token);
SELECT idem_complete('resolve:no', '1', token) FROM idem_lookup('resolve:no');
SELECT claimed, checkpoint FROM idem_lease('resolve:no', '[2]');
-- ... and is not held up: until somebody decides, it may complete
SELECT idem_complete('resolve:slow', '"slow"', token) FROM idem_lookup('resolve:slow');
SELECT idem_resolve('resolve:slow', false);

-- first_sent
SELECT idem_create_store('store', '1 hour', 2);
SELECT ago, try(format('status FROM idem_lease(''absent'', first_sent => now() - %L::interval, store => ''store'')', ago)) AS lease,
	try(format('status FROM idem_try_lease(''absent'', first_sent => now() - %L::interval, store => ''store'')', ago)) AS try_lease
FROM unnest('{59 min,61 min,-1 min}'::interval[]) AS ago;
SELECT claimed FROM idem_lease('there', store => 'store');
SELECT try($$status FROM idem_try_lease('there', first_sent => '2000-01-01', store => 'store')$$), try($$status FROM idem_try_lease('there', first_sent => 'infinity', store => 'store')$$),
	try($$status FROM idem_try_lease('absent', first_sent => '-infinity', store => 'store')$$);

-- A lease in a generation that is no longer current moves to the current one
UPDATE store SET generation = 1, lease_until = now() - interval '1 s';
SELECT idem_checkpoint('there', token, '1', 'store') FROM idem_lookup('there', 'store');
SELECT key, status, generation, checkpoint FROM store;
UPDATE store SET generation = 1;
SELECT claimed, checkpoint FROM idem_lease('there', on_uncertain => 'retry', store => 'store');
SELECT key, status, generation, attempts FROM store;
UPDATE store SET generation = 1;
SELECT idem_complete('there', '1', token, 'store') FROM idem_lookup('there', 'store');
SELECT key, status, generation FROM store;

-- Tokens come from one sequence, whatever the store, and are never lower than what the key has seen
SELECT (SELECT token FROM idem_lease('one', store => 'store')) < (SELECT token FROM idem_lease('one')) AS grows;
INSERT INTO store (key, status, token) VALUES ('ahead', 'released', 1e15), ('too far', 'released', 9223372036854775807), ('near the end', 'released', 9223372036854775807 - 1048577);
SELECT token > 1e15 AS grows FROM idem_lease('ahead', store => 'store');
SELECT token > 1e15 AS grows FROM idem_lease('one:more');
SELECT try($$claimed FROM idem_lease('too far', store => 'store')$$), try($$claimed FROM idem_lease('near the end', store => 'store')$$);
SELECT last_value < 1e16 AS far_from_the_end FROM idem_token_seq;

-- What waits for a decision, oldest first
TRUNCATE idem_completions, store;
SET application_name = 'mailer';
SELECT key, claimed FROM unnest('{b,a,running}'::text[]) AS key, idem_lease(key, lease => '1 h');
SELECT claimed FROM idem_lease('c', store => 'store');
SELECT idem_checkpoint('a', token, '{"step": 1}') FROM idem_lookup('a');
SELECT pass('a', '2 h'), pass('b', '3 h');
SELECT claimed FROM idem_lease('b', on_uncertain => 'retry');
SELECT pass('b', '3 h');
UPDATE store SET lease_until = now() - interval '90 min';
INSERT INTO idem_completions (key, status, lease_until, claimed_by) VALUES
	('by hand', 'leased', now() - interval '1 day', 'somebody'), ('odd 1', 'leased', now() - interval '2 days', '{"user": x"since": "y"}'),
	('odd 2', 'leased', now() - interval '3 days', '{"user": "u", "application": "\ud800", "address": "", "pid": 1, "since": "2000-01-01"}'),
	('odd 3', 'leased', now() - interval '4 days', '{"user": "u", "application": "a", "address": "", "pid": 1, "since": "yesteryear"}'),
	('no end', 'leased', NULL, NULL), ('-infinity', 'leased', '-infinity', '"'), ('infinity', 'leased', 'infinity', '');
SELECT key, store, token > 0 AS token, leases, held_by = session_user AS held_by, application, client_address IS NOT NULL AS address,
	since BETWEEN now() - interval '1 min' AND clock_timestamp() AS since, date_trunc('hour', overdue) AS overdue, checkpoint
FROM idem_uncertain;
SELECT count(*) FROM idem_uncertain WHERE overdue > interval '1 hour' AND store = 'idem_completions'::regclass;
-- ... whatever the style of dates of who took it and of who looks
DELETE FROM idem_completions;
SET datestyle = 'SQL, DMY';
SET timezone = 'Asia/Kolkata';
SELECT claimed FROM idem_lease('style');
SET datestyle = 'Postgres, MDY';
SET timezone = 'America/New_York';
SELECT pass('style');
SELECT since BETWEEN now() - interval '1 min' AND clock_timestamp() AS since FROM idem_uncertain WHERE key = 'style';
RESET datestyle;
RESET timezone;
-- ... a table that only looks like a store is not taken for one
CREATE TABLE looks (key bigint, status text, attempts int, token bigint, claimed_at timestamptz, completed_at timestamptz, lease_until timestamptz,
	claimed_by text, fingerprint uuid, checkpoint jsonb, result json, generation smallint, CONSTRAINT idem_check CHECK (true)) PARTITION BY LIST (generation);
CREATE TABLE looks_0 PARTITION OF looks DEFAULT;
INSERT INTO looks VALUES (4000000000, 'leased', 1, 1, now(), now(), now() - interval '1 s', 'x', NULL, NULL, NULL, 0);
CREATE TABLE looks_too (key text, status int, attempts int, token bigint, claimed_at timestamptz, completed_at timestamptz, lease_until timestamptz,
	claimed_by text, fingerprint uuid, checkpoint jsonb, result json, generation smallint, CONSTRAINT idem_check CHECK (true)) PARTITION BY LIST (generation);
SELECT key, store FROM idem_uncertain ORDER BY key;
DROP TABLE looks, looks_too;
-- ... and a broken store does not hide the others
ALTER TABLE store DETACH PARTITION store_1;
SELECT key, store FROM idem_uncertain ORDER BY key;
DROP TABLE store, store_1;

-- Privileges: SELECT, INSERT and UPDATE on the store, for everything that has to do with leases
CREATE ROLE regress_idem_owner;
CREATE ROLE regress_idem_user;
GRANT ALL ON SCHEMA lease_test TO regress_idem_owner, regress_idem_user;
SET ROLE regress_idem_owner;
SELECT idem_create_store('theirs');
RESET ROLE;
SELECT claimed FROM idem_lease('over', store => 'theirs');
SELECT claimed FROM idem_lease('running', store => 'theirs');
UPDATE theirs SET lease_until = now() - interval '1 hour' WHERE key = 'over';
GRANT USAGE ON SCHEMA public TO regress_idem_user;
CREATE TABLE token AS SELECT key, token FROM theirs;
CREATE TABLE granted (privileges text, call text, state text);
GRANT ALL ON granted, token TO PUBLIC;
DO $do$
DECLARE
	p text;
BEGIN
	FOREACH p IN ARRAY '{"",SELECT,INSERT,"SELECT, INSERT","SELECT, UPDATE","INSERT, UPDATE","SELECT, INSERT, UPDATE","DELETE, TRUNCATE"}'::text[] LOOP
		IF p <> '' THEN
			EXECUTE format('GRANT %s ON theirs TO regress_idem_user', p);
		END IF;
		SET LOCAL ROLE regress_idem_user;
		INSERT INTO granted SELECT p, name, try(call) FROM (VALUES
			('lease', $$claimed FROM idem_lease('new', store => 'theirs')$$), ('try_lease', $$claimed FROM idem_try_lease('new', store => 'theirs')$$),
			('checkpoint', $$idem_checkpoint('over', token, '1', 'theirs') FROM token WHERE key = 'over'$$),
			('extend', $$idem_extend('over', token, '1 h', 'theirs') FROM token WHERE key = 'over'$$),
			('complete', $$idem_complete('over', '1', token, 'theirs') FROM token WHERE key = 'over'$$),
			('release', $$idem_release('over', token, 'theirs') FROM token WHERE key = 'over'$$),
			('resolve', $$idem_resolve('over', true, store => 'theirs')$$), ('resolve any', $$idem_resolve('over', true, 1, 'theirs')$$),
			('claim', $$idem_try_claim('over', store => 'theirs')$$)) AS c(name, call);
		RESET ROLE;
		EXECUTE 'REVOKE ALL ON theirs FROM regress_idem_user';
	END LOOP;
END $do$;
SELECT privileges, string_agg(call, ', ' ORDER BY call) FILTER (WHERE state = '42501') AS refused,
	string_agg(call, ', ' ORDER BY call) FILTER (WHERE state <> '42501') AS allowed
FROM granted GROUP BY 1 ORDER BY 1;
-- ... who sees what waits for a decision: who may read the store, and pg_read_all_stats
SELECT pass('style');
SELECT key, store FROM idem_uncertain ORDER BY key;
SET ROLE regress_idem_owner;
SELECT key, store FROM idem_uncertain ORDER BY key;
SET ROLE regress_idem_user;
SELECT key, store FROM idem_uncertain ORDER BY key;
RESET ROLE;
GRANT SELECT ON theirs TO regress_idem_user;
SET ROLE regress_idem_user;
SELECT key, store FROM idem_uncertain ORDER BY key;
RESET ROLE;
REVOKE SELECT ON theirs FROM regress_idem_user;
GRANT pg_read_all_stats TO regress_idem_user;
SET ROLE regress_idem_user;
SELECT key, store FROM idem_uncertain ORDER BY key;
-- ... but who may only look cannot decide
SELECT idem_resolve('over', true, store => 'theirs');
RESET ROLE;
REVOKE pg_read_all_stats FROM regress_idem_user;
-- ... row security hides nothing from the one and everything from the other
GRANT SELECT, INSERT, UPDATE ON theirs TO regress_idem_user;
ALTER TABLE theirs ENABLE ROW LEVEL SECURITY;
SET ROLE regress_idem_user;
SELECT key, store FROM idem_uncertain ORDER BY key;
SELECT try($$idem_lease('new', store => 'theirs')$$), try($$idem_extend('over', 1, '1 h', 'theirs')$$), try($$idem_resolve('over', true, store => 'theirs')$$), try($$idem_complete('over', '1', 1, 'theirs')$$);
SET ROLE regress_idem_owner;
SELECT key, store FROM idem_uncertain ORDER BY key;
RESET ROLE;
SELECT key, store FROM idem_uncertain ORDER BY key;

-- A trigger that swallows the lease is an error, never a lease
CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER swallow BEFORE UPDATE ON idem_completions_0 FOR EACH ROW EXECUTE FUNCTION swallow();
SELECT try($$idem_lease('style', on_uncertain => 'retry')$$), try($$idem_extend('style', token, '1 h') FROM idem_lookup('style')$$), try($$idem_complete('style', '1', token) FROM idem_lookup('style')$$),
	try($$idem_resolve('style', false)$$), try($$idem_lease('style', on_uncertain => 'skip')$$), try($$idem_release('style', token) FROM idem_lookup('style')$$);
DROP TRIGGER swallow ON idem_completions_0;
CREATE TRIGGER swallow BEFORE INSERT ON idem_completions_0 FOR EACH ROW EXECUTE FUNCTION swallow();
SELECT try($$idem_lease('swallowed')$$);
DROP TRIGGER swallow ON idem_completions_0;

SET client_min_messages = warning;
DROP SCHEMA lease_test CASCADE;
REVOKE ALL ON SCHEMA public FROM regress_idem_user;
DROP ROLE regress_idem_owner, regress_idem_user;
TRUNCATE idem_completions;
