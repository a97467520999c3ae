/* idem--1.0.sql: the SQL objects of idem */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION idem" to load this file. \quit

-- Types

CREATE TYPE idem_completion AS (
	key text COLLATE "C",
	status text,
	attempts integer,
	token bigint,
	claimed_at timestamptz,
	completed_at timestamptz,
	lease_until timestamptz,
	claimed_by text,
	fingerprint uuid,
	checkpoint jsonb,
	result json,
	generation smallint
);

COMMENT ON TYPE idem_completion IS
'the completion table type: a row of any store';
COMMENT ON COLUMN idem_completion.key IS
'names the intended operation, never the attempt';
COMMENT ON COLUMN idem_completion.status IS
'completed, leased, skipped or released';
COMMENT ON COLUMN idem_completion.attempts IS
'how often the operation was claimed to this record''s knowledge';
COMMENT ON COLUMN idem_completion.token IS
'fencing token of the latest lease';
COMMENT ON COLUMN idem_completion.claimed_at IS
'when the operation was claimed';
COMMENT ON COLUMN idem_completion.completed_at IS
'when the operation was completed; retention counts from the commit, which is later';
COMMENT ON COLUMN idem_completion.lease_until IS
'when the latest lease ends';
COMMENT ON COLUMN idem_completion.claimed_by IS
'who took the latest lease';
COMMENT ON COLUMN idem_completion.fingerprint IS
'idem_fingerprint() of the request';
COMMENT ON COLUMN idem_completion.checkpoint IS
'progress recorded by the holder of the lease';
COMMENT ON COLUMN idem_completion.result IS
'result of the operation, byte for byte as stored';
COMMENT ON COLUMN idem_completion.generation IS
'partition of the store; the unit of expiry';

CREATE TYPE idem_outcome AS (
	claimed boolean,
	status text,
	result json,
	completed_at timestamptz,
	token bigint,
	lease_until timestamptz,
	checkpoint jsonb
);

COMMENT ON TYPE idem_outcome IS
'what a claim or lease is answered: claimed means do the work, otherwise status says why not';

-- Stores

CREATE TABLE idem_store_state (
	store oid NOT NULL,
	schema_name name NOT NULL,
	store_name name NOT NULL,
	origin text COLLATE "C" NOT NULL,
	retention bigint,
	current smallint NOT NULL DEFAULT 0,
	filling_since timestamptz,
	sealed_at timestamptz[] NOT NULL DEFAULT '{}',
	sealed_xid xid8[] NOT NULL DEFAULT '{}',
	sealed_file oid[] NOT NULL DEFAULT '{}',
	watermark timestamptz,
	last_step_at timestamptz,
	generations_expired bigint NOT NULL DEFAULT 0,
	trouble text
);

ALTER TABLE idem_store_state REPLICA IDENTITY FULL;

COMMENT ON TABLE idem_store_state IS
'bookkeeping of expiry; it only advises, locks and records decide';

CREATE FUNCTION idem_check(key text, status text, generation smallint, generations integer)
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_check'
LANGUAGE C IMMUTABLE PARALLEL SAFE;

COMMENT ON FUNCTION idem_check(text, text, smallint, integer) IS
'CHECK constraint of every store: rules of a key, known status, existing generation';

CREATE FUNCTION idem_generation(store regclass)
RETURNS smallint
AS 'MODULE_PATHNAME', 'idem_generation'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION idem_generation(regclass) IS
'the generation of a store that a plain INSERT lands in';

CREATE FUNCTION idem_create_store(name text, retention interval DEFAULT '30 days', generations integer DEFAULT 4)
RETURNS text
AS 'MODULE_PATHNAME', 'idem_create_store'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION idem_create_store(text, interval, integer) IS
'creates a store owned by the caller and returns its name; a day of retention is 24 hours';

SELECT @extschema@.idem_create_store('idem_completions'::pg_catalog.text,
	'30 days'::pg_catalog.interval, 4::pg_catalog.int4);

COMMENT ON TABLE idem_completions IS
'the default store of idem: a record for each completed or leased operation';

SELECT pg_catalog.pg_extension_config_dump('idem_store_state', '');
SELECT pg_catalog.pg_extension_config_dump('idem_completions_0', '');
SELECT pg_catalog.pg_extension_config_dump('idem_completions_1', '');
SELECT pg_catalog.pg_extension_config_dump('idem_completions_2', '');
SELECT pg_catalog.pg_extension_config_dump('idem_completions_3', '');

CREATE FUNCTION idem_set_retention(retention interval, store regclass DEFAULT 'idem_completions')
RETURNS text
AS 'MODULE_PATHNAME', 'idem_set_retention'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION idem_set_retention(interval, regclass) IS
'sets how long records are kept after their commit, also those already there; returns the name of the store';

CREATE PROCEDURE idem_expire(store regclass DEFAULT NULL)
AS 'MODULE_PATHNAME', 'idem_expire'
LANGUAGE C;

COMMENT ON PROCEDURE idem_expire(regclass) IS
'does the steps of expiry that are due, each in its own transaction: of one store, or of all that the caller owns';

CREATE FUNCTION idem_store_status(store regclass, OUT retention interval, OUT current smallint,
	OUT filling_since timestamptz, OUT last_step_at timestamptz, OUT watermark timestamptz,
	OUT generations_expired bigint, OUT trouble text)
AS 'MODULE_PATHNAME', 'idem_store_status'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION idem_store_status(regclass) IS
'bookkeeping of a store, for the view idem_stores';

CREATE FUNCTION idem_generation_sealed_at(store regclass, generation integer, partition regclass)
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'idem_generation_sealed_at'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION idem_generation_sealed_at(regclass, integer, regclass) IS
'when a generation was sealed, for the view idem_stores';

CREATE FUNCTION idem_oldest_record(partition regclass)
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'idem_oldest_record'
LANGUAGE C STABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION idem_oldest_record(regclass) IS
'when the first record of a partition was completed, for the view idem_stores';

CREATE FUNCTION idem_worker_status()
RETURNS text
AS 'MODULE_PATHNAME', 'idem_worker_status'
LANGUAGE C STABLE PARALLEL SAFE;

COMMENT ON FUNCTION idem_worker_status() IS
'whether a worker expires records in the background, for the view idem_stores';

CREATE VIEW idem_stores AS
WITH store AS MATERIALIZED ( -- so that the bookkeeping of each is read once
	SELECT rel.oid AS store, s.*
	FROM pg_catalog.pg_constraint con
	JOIN pg_catalog.pg_class rel ON rel.oid = con.conrelid AND rel.relkind = 'p'
		AND rel.relpersistence = 'p'
	CROSS JOIN LATERAL @extschema@.idem_store_status(rel.oid::pg_catalog.regclass) s
	WHERE con.conname = 'idem_check' AND con.contype = 'c'
), generation AS (
	SELECT store.*,
		count(*) OVER (PARTITION BY store.store) AS generations,
		number.generation,
		part.oid AS partition,
		greatest(part.reltuples, 0)::bigint AS records,
		pg_catalog.pg_total_relation_size(part.oid) AS bytes,
		pg_catalog.pg_relation_size(part.oid) = 0 AS is_empty,
		@extschema@.idem_generation_sealed_at(store.store::pg_catalog.regclass,
			number.generation, part.oid::pg_catalog.regclass) AS sealed_at
	FROM store
	JOIN pg_catalog.pg_inherits inh ON inh.inhparent = store.store
	JOIN pg_catalog.pg_class part ON part.oid = inh.inhrelid
	CROSS JOIN LATERAL (SELECT pg_catalog.substring(
		pg_catalog.pg_get_expr(part.relpartbound, part.oid),
		'^FOR VALUES IN \(''?(\d{1,3})''?\)$')::integer) AS number(generation)
	WHERE number.generation IS NOT NULL
), state AS (
	SELECT *,
		CASE WHEN generation = current THEN 'filling' WHEN is_empty THEN 'empty'
			WHEN sealed_at IS NOT NULL THEN 'sealed' ELSE 'full' END AS state
	FROM generation
), due AS (
	SELECT *, CASE state
		WHEN 'sealed' THEN sealed_at + retention
		WHEN 'full' THEN filling_since
		WHEN 'filling' THEN CASE WHEN NOT is_empty AND generations > 1
			THEN filling_since + retention / (generations - 1)::double precision END END AS due_at
	FROM state
)
SELECT store::pg_catalog.regclass AS store,
	retention,
	generations,
	pg_catalog.array_agg(state ORDER BY generation) AS states,
	pg_catalog.sum(records)::bigint AS records,
	pg_catalog.sum(bytes)::bigint AS bytes,
	pg_catalog.min(@extschema@.idem_oldest_record(partition::pg_catalog.regclass)) AS oldest_record,
	generations_expired,
	last_step_at AS last_expiry,
	pg_catalog.min(due_at) AS next_expiry,
	CASE WHEN pg_catalog.min(due_at) < pg_catalog.clock_timestamp()
		AND pg_catalog.isfinite(pg_catalog.min(due_at))
		THEN pg_catalog.clock_timestamp() - pg_catalog.min(due_at) END AS overdue,
	idem_worker_status() AS worker,
	trouble
FROM due
GROUP BY store, retention, generations, generations_expired, last_step_at, trouble;

COMMENT ON VIEW idem_stores IS
'all stores: retention, states of their generations, size (records is an estimate of ANALYZE), oldest record, when a step of expiry was last done and is due next, by how much that is overdue, and whether a worker runs';

-- Effects inside the database

CREATE FUNCTION idem_claim(key text, request jsonb DEFAULT NULL, wait interval DEFAULT NULL,
	first_sent timestamptz DEFAULT NULL, store regclass DEFAULT 'idem_completions')
RETURNS idem_outcome
AS 'MODULE_PATHNAME', 'idem_claim'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_claim(text, jsonb, interval, timestamptz, regclass) IS
'claims a key for this transaction, waits for the operation in flight, or replays its result; errors ID001 to ID004 for other states';

CREATE FUNCTION idem_try_claim(key text, request jsonb DEFAULT NULL, wait interval DEFAULT '0',
	first_sent timestamptz DEFAULT NULL, store regclass DEFAULT 'idem_completions')
RETURNS idem_outcome
AS 'MODULE_PATHNAME', 'idem_try_claim'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_try_claim(text, jsonb, interval, timestamptz, regclass) IS
'like idem_claim, but never raises an error for the state of the key: status says why it was not claimed';

CREATE FUNCTION idem_claim_batch(keys text[], requests jsonb[] DEFAULT NULL,
	wait interval DEFAULT NULL, store regclass DEFAULT 'idem_completions')
RETURNS TABLE (ordinality integer, key text, claimed boolean, status text, result json,
	completed_at timestamptz, token bigint, lease_until timestamptz, checkpoint jsonb)
AS 'MODULE_PATHNAME', 'idem_claim_batch'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000 ROWS 100;

COMMENT ON FUNCTION idem_claim_batch(text[], jsonb[], interval, regclass) IS
'claims many keys in one call, locked in one global order and answered in the given one, like idem_try_claim';

CREATE FUNCTION idem_complete(key text, result text DEFAULT NULL, token bigint DEFAULT NULL,
	store regclass DEFAULT 'idem_completions')
RETURNS json
AS 'MODULE_PATHNAME', 'idem_complete'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_complete(text, text, bigint, regclass) IS
'stores the result, which must be valid JSON, under the claim held by this transaction, or with a token under a lease, and returns it';

CREATE FUNCTION idem_complete(key text, result anyelement, token bigint DEFAULT NULL,
	store regclass DEFAULT 'idem_completions')
RETURNS json
AS 'MODULE_PATHNAME', 'idem_complete_any'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_complete(text, anyelement, bigint, regclass) IS
'stores the result under the claim held by this transaction, or with a token under a lease, and returns it: json and jsonb as they print, other types through to_json()';

CREATE FUNCTION idem_release(key text, token bigint DEFAULT NULL, store regclass DEFAULT 'idem_completions')
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_release'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_release(text, bigint, regclass) IS
'gives up a claim, or with a token a lease: nothing was done, a retry may run; false when nothing is held';

CREATE FUNCTION idem_once(key text, request jsonb DEFAULT NULL, store regclass DEFAULT 'idem_completions')
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_once'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_once(text, jsonb, regclass) IS
'claims and completes a key in one call, without a result: true the first time only';

CREATE FUNCTION idem_run(key text, handler text, request jsonb DEFAULT NULL, wait interval DEFAULT NULL,
	first_sent timestamptz DEFAULT NULL, store regclass DEFAULT 'idem_completions')
RETURNS idem_outcome
AS 'MODULE_PATHNAME', 'idem_run'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_run(text, text, jsonb, interval, timestamptz, regclass) IS
'claims a key, calls handler(jsonb) or handler(), and completes with what it returns; claimed means that it ran now';

CREATE FUNCTION idem_lookup(key text, store regclass DEFAULT 'idem_completions')
RETURNS SETOF idem_completion
AS 'MODULE_PATHNAME', 'idem_lookup'
LANGUAGE C STABLE PARALLEL SAFE ROWS 1;

COMMENT ON FUNCTION idem_lookup(text, regclass) IS
'reads the record of a key, if there is one; takes no lock on the key and works on a standby';

CREATE FUNCTION idem_forget(key text, store regclass DEFAULT 'idem_completions')
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_forget'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_forget(text, regclass) IS
'deletes the record of a key, so that the operation may run again; true if there was one';

-- Effects outside the database

CREATE SEQUENCE idem_token_seq;

COMMENT ON SEQUENCE idem_token_seq IS
'fencing tokens: every lease in the database gets a larger one';

SELECT pg_catalog.pg_extension_config_dump('idem_token_seq', '');

CREATE FUNCTION idem_lease(key text, request jsonb DEFAULT NULL, lease interval DEFAULT '5 min',
	on_uncertain text DEFAULT 'reconcile', retry_window interval DEFAULT NULL,
	first_sent timestamptz DEFAULT NULL, store regclass DEFAULT 'idem_completions')
RETURNS idem_outcome
AS 'MODULE_PATHNAME', 'idem_lease'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_lease(text, jsonb, interval, text, interval, timestamptz, regclass) IS
'takes a lease: COMMIT it, perform the effect, then call idem_complete() with the token; on_uncertain (reconcile, retry or skip) decides when an earlier lease ran out';

CREATE FUNCTION idem_try_lease(key text, request jsonb DEFAULT NULL, lease interval DEFAULT '5 min',
	on_uncertain text DEFAULT 'reconcile', retry_window interval DEFAULT NULL,
	first_sent timestamptz DEFAULT NULL, store regclass DEFAULT 'idem_completions')
RETURNS idem_outcome
AS 'MODULE_PATHNAME', 'idem_try_lease'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_try_lease(text, jsonb, interval, text, interval, timestamptz, regclass) IS
'like idem_lease, but does not wait and never raises an error for the state of the key';

CREATE FUNCTION idem_checkpoint(key text, token bigint, checkpoint jsonb, store regclass DEFAULT 'idem_completions')
RETURNS jsonb
AS 'MODULE_PATHNAME', 'idem_checkpoint'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_checkpoint(text, bigint, jsonb, regclass) IS
'records progress under a lease; the next lease of the key gets it back';

CREATE FUNCTION idem_extend(key text, token bigint, lease interval, store regclass DEFAULT 'idem_completions')
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'idem_extend'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_extend(text, bigint, interval, regclass) IS
'lets a lease end that long from now, and returns when';

CREATE FUNCTION idem_resolve(key text, happened boolean, result text DEFAULT NULL,
	store regclass DEFAULT 'idem_completions')
RETURNS idem_completion
AS 'MODULE_PATHNAME', 'idem_resolve'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_resolve(text, boolean, text, regclass) IS
'decides an uncertain key: completed with a result, which must be valid JSON, or not happened, so that a retry may run';

CREATE FUNCTION idem_resolve(key text, happened boolean, result anyelement,
	store regclass DEFAULT 'idem_completions')
RETURNS idem_completion
AS 'MODULE_PATHNAME', 'idem_resolve_any'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_resolve(text, boolean, anyelement, regclass) IS
'decides an uncertain key: completed with a result (json and jsonb as they print, other types through to_json()), or not happened';

CREATE FUNCTION idem_uncertain_records(OUT store regclass, OUT key text, OUT token bigint,
	OUT attempts integer, OUT claimed_by text, OUT lease_until timestamptz, OUT checkpoint jsonb)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem_uncertain_records'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION idem_uncertain_records() IS
'leases that have run out, in all stores whose records the caller may see, for the view idem_uncertain';

CREATE VIEW idem_uncertain AS
SELECT key, store, token, attempts AS leases,
	CASE WHEN is_holder THEN claimed_by::json OPERATOR(pg_catalog.->>) 'user'::text ELSE claimed_by END AS held_by,
	CASE WHEN is_holder THEN claimed_by::json OPERATOR(pg_catalog.->>) 'application'::text END AS application,
	CASE WHEN is_holder THEN claimed_by::json OPERATOR(pg_catalog.->>) 'address'::text END AS client_address,
	CASE WHEN is_holder THEN pg_catalog.to_timestamp((claimed_by::json OPERATOR(pg_catalog.->>) 'since'::text)::pg_catalog.float8
		OPERATOR(pg_catalog./) 1000000::pg_catalog.float8) END AS since,
	lease_until,
	CASE WHEN pg_catalog.isfinite(lease_until)
		THEN pg_catalog.clock_timestamp() - lease_until END AS overdue,
	checkpoint
FROM idem_uncertain_records(),
	LATERAL (SELECT pg_catalog.regexp_like(claimed_by, pg_catalog.format(
		'^\{"user": %1$s, "application": %1$s, "address": %1$s, "pid": \d{1,10}, "since": \d{1,16}\}$',
		'"([^"\\[:cntrl:]]|\\["\\bfnrt])*"')) AS is_holder) AS h
ORDER BY lease_until NULLS FIRST;

COMMENT ON VIEW idem_uncertain IS
'operations whose lease has run out and that wait for a decision (idem_resolve), oldest first';

-- Statistics

CREATE TABLE idem_history (
	minute timestamptz NOT NULL,
	store oid NOT NULL,
	store_name text NOT NULL,
	origin text COLLATE "C" NOT NULL,
	seconds double precision NOT NULL,
	claims bigint NOT NULL,
	executed bigint NOT NULL,
	suppressed bigint NOT NULL,
	waits bigint NOT NULL,
	wait_ms double precision NOT NULL,
	in_progress bigint NOT NULL,
	key_reused bigint NOT NULL,
	too_late bigint NOT NULL,
	unfinished bigint NOT NULL,
	released bigint NOT NULL,
	rolled_back bigint NOT NULL,
	leases bigint NOT NULL,
	uncertain bigint NOT NULL,
	retried bigint NOT NULL,
	skipped bigint NOT NULL,
	resolved bigint NOT NULL,
	PRIMARY KEY (minute, store, origin)
);

COMMENT ON TABLE idem_history IS
'counters of each store by the minute, kept 30 days; a minute in which nothing was counted has no row';
COMMENT ON COLUMN idem_history.minute IS
'in which the row''s time began';
COMMENT ON COLUMN idem_history.seconds IS
'how long the row''s time was, usually 60';
COMMENT ON COLUMN idem_history.origin IS
'system identifier and oid of the database that counted';

CREATE FUNCTION idem_stat_counters(required boolean, OUT store oid,
	OUT claims bigint, OUT executed bigint, OUT suppressed bigint, OUT waits bigint,
	OUT wait_usecs bigint, OUT in_progress bigint, OUT key_reused bigint, OUT too_late bigint,
	OUT unfinished bigint, OUT released bigint, OUT rolled_back bigint, OUT leases bigint,
	OUT uncertain bigint, OUT retried bigint, OUT skipped bigint, OUT resolved bigint,
	OUT keys_sampled bigint, OUT keys_random bigint, OUT keys_email bigint, OUT wait_usecs_max bigint,
	OUT stats_reset timestamptz)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem_stat_counters'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION idem_stat_counters(boolean) IS
'counters of this database''s stores in shared memory, for the views; required: without preload an error and not nothing';

CREATE FUNCTION idem_stat_status(OUT preloaded boolean, OUT tracking boolean, OUT capacity integer,
	OUT used integer, OUT overflowed bigint, OUT started_from text)
AS 'MODULE_PATHNAME', 'idem_stat_status'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION idem_stat_status() IS
'whether there are statistics, how many stores of all databases are counted and can be, and how many answers were not counted since they could not';

CREATE FUNCTION idem_stat_hot_keys(required boolean, OUT store oid, OUT role oid, OUT key text,
	OUT replays bigint, OUT error bigint, OUT first_replay timestamptz, OUT last_replay timestamptz)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem_stat_hot_keys'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION idem_stat_hot_keys(boolean) IS
'keys that are replayed most, for the view idem_stat_keys';

CREATE FUNCTION idem_stat_activity(required boolean, OUT pid integer, OUT role oid, OUT store oid,
	OUT key text, OUT hash integer, OUT waiting boolean, OUT since timestamptz, OUT others integer)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem_stat_activity'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION idem_stat_activity(boolean) IS
'keys that sessions hold or wait for now, for the views';

CREATE FUNCTION idem_stat_reset(store regclass DEFAULT 'idem_completions')
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'idem_stat_reset'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION idem_stat_reset(regclass) IS
'lets idem_stat and idem_stat_keys count a store from zero, and returns when; idem_history stays';

CREATE VIEW idem_stat AS
SELECT store.oid::pg_catalog.regclass AS store,
	coalesce(c.claims, 0) AS claims,
	coalesce(c.executed, 0) AS executed,
	coalesce(c.suppressed, 0) AS suppressed,
	pg_catalog.round(c.suppressed::numeric / nullif(c.suppressed + c.executed, 0), 4) AS suppression_ratio,
	coalesce(c.waits, 0) AS waits,
	coalesce(c.wait_usecs, 0) / 1000.0::double precision AS wait_ms,
	coalesce(c.wait_usecs_max, 0) / 1000.0::double precision AS wait_ms_max,
	coalesce(c.in_progress, 0) AS in_progress,
	coalesce(c.key_reused, 0) AS key_reused,
	coalesce(c.too_late, 0) AS too_late,
	coalesce(c.unfinished, 0) AS unfinished,
	coalesce(c.released, 0) AS released,
	coalesce(c.rolled_back, 0) AS rolled_back,
	coalesce(c.leases, 0) AS leases,
	coalesce(c.uncertain, 0) AS uncertain,
	coalesce(c.retried, 0) AS retried,
	coalesce(c.skipped, 0) AS skipped,
	coalesce(c.resolved, 0) AS resolved,
	(SELECT s.generations_expired FROM idem_store_status(store.oid) s) AS generations_expired,
	c.stats_reset
FROM pg_catalog.pg_constraint con
JOIN pg_catalog.pg_class store ON store.oid = con.conrelid AND store.relkind = 'p'
LEFT JOIN idem_stat_counters(true) c ON c.store = store.oid
WHERE con.conname = 'idem_check' AND con.contype = 'c';

COMMENT ON VIEW idem_stat IS
'what became of the claims of each store since stats_reset';
COMMENT ON COLUMN idem_stat.claims IS
'keys that were claimed or leased and answered, whatever the answer';
COMMENT ON COLUMN idem_stat.executed IS
'operations done: completions that committed or were prepared';
COMMENT ON COLUMN idem_stat.suppressed IS
'duplicates answered from a completion';
COMMENT ON COLUMN idem_stat.suppression_ratio IS
'suppressed / (suppressed + executed)';
COMMENT ON COLUMN idem_stat.waits IS
'how often a session waited for another that held the key';
COMMENT ON COLUMN idem_stat.in_progress IS
'answers that the operation is in progress: ID002, or status in_progress';
COMMENT ON COLUMN idem_stat.unfinished IS
'claims that COMMIT refused with ID006';
COMMENT ON COLUMN idem_stat.released IS
'claims and leases that were given up';
COMMENT ON COLUMN idem_stat.rolled_back IS
'claims and leases undone by a rollback, an error, the end of the session, or ROLLBACK TO';
COMMENT ON COLUMN idem_stat.leases IS
'leases taken, retries included';
COMMENT ON COLUMN idem_stat.retried IS
'leases taken over from one that had run out';

CREATE VIEW idem_stat_keys AS
SELECT k.store::pg_catalog.regclass AS store, k.key, r.rolname AS usename, k.replays, k.error,
	k.first_replay, k.last_replay
FROM idem_stat_hot_keys(true) k
LEFT JOIN pg_catalog.pg_roles r ON r.oid = k.role
ORDER BY k.replays DESC, k.store, k.key;

COMMENT ON VIEW idem_stat_keys IS
'keys replayed most often, by user: the true number is between replays - error and replays (Space-Saving)';

CREATE VIEW idem_in_flight AS
WITH activity AS MATERIALIZED (
	SELECT * FROM idem_stat_activity(true)
), waiter AS MATERIALIZED (
	SELECT w.pid, w.store, w.hash, pg_catalog.pg_blocking_pids(w.pid) AS blockers
	FROM activity w WHERE w.waiting
)
SELECT a.pid, r.rolname AS usename, s.application_name AS application, a.key,
	a.store::pg_catalog.regclass AS store, a.since, a.others,
	ARRAY(SELECT w.pid FROM waiter w
		WHERE a.pid = ANY (w.blockers)
			AND (a.others > 0 OR (w.store = a.store AND w.hash = a.hash)) ORDER BY w.pid) AS waiting_pids
FROM activity a
LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.role
LEFT JOIN pg_catalog.pg_stat_activity s ON s.pid = a.pid
WHERE NOT a.waiting
ORDER BY a.since;

COMMENT ON VIEW idem_in_flight IS
'claims held now, up to four of each session (others says how many more), and which sessions wait for them';

CREATE VIEW idem_spikes AS
SELECT h.minute, h.store, h.store_name, h.origin,
	pg_catalog.round(rate.suppressed::numeric, 1) AS suppressed,
	pg_catalog.round(base.median::numeric, 1) AS baseline,
	pg_catalog.round(limits.threshold::numeric, 1) AS threshold
FROM idem_history h
CROSS JOIN LATERAL (SELECT h.suppressed * 60 / greatest(h.seconds, 1) AS suppressed) rate
CROSS JOIN LATERAL (
	SELECT least(coalesce(pg_catalog.date_part('epoch', h.minute - pg_catalog.min(f.minute)) / 60, 0), 1440)::integer AS minutes
	FROM idem_history f
	WHERE f.minute >= h.minute - interval '1 day' AND f.minute < h.minute
		AND f.store = h.store AND f.origin = h.origin
) known
CROSS JOIN LATERAL (
	WITH earlier AS MATERIALIZED (
		SELECT t.suppressed * 60 / greatest(t.seconds, 1) AS n
		FROM idem_history t
		WHERE t.minute >= h.minute - interval '1 day' AND t.minute < h.minute
			AND t.store = h.store AND t.origin = h.origin
	), filled AS MATERIALIZED (
		SELECT n FROM earlier
		UNION ALL
		SELECT 0 FROM pg_catalog.generate_series(1, known.minutes - (SELECT pg_catalog.count(*) FROM earlier))
	), middle AS MATERIALIZED (
		SELECT pg_catalog.percentile_cont(0.5) WITHIN GROUP (ORDER BY n) AS median FROM filled
	)
	SELECT middle.median,
		pg_catalog.percentile_cont(0.5) WITHIN GROUP (ORDER BY pg_catalog.abs(filled.n - middle.median)) AS spread
	FROM filled, middle
	GROUP BY middle.median
) base
CROSS JOIN LATERAL (
	SELECT greatest(20, 3 * base.median, base.median + 10 * 1.4826 * base.spread) AS threshold
) limits
WHERE rate.suppressed > 20 AND known.minutes >= 60 AND rate.suppressed > limits.threshold;

COMMENT ON VIEW idem_spikes IS
'minutes whose suppressed duplicates exceed 20, 3 times the median, and the median by 10 robust standard deviations, of the store''s minutes in the day before; the first hour of a store never does; ask for a range of minutes';

CREATE VIEW idem_health AS
WITH status AS MATERIALIZED (
	SELECT * FROM idem_stat_status()
), activity AS MATERIALIZED (
	SELECT a.*, s.state, s.state_change
	FROM idem_stat_activity(false) a
	LEFT JOIN pg_catalog.pg_stat_activity s ON s.pid = a.pid
), stores AS MATERIALIZED (
	SELECT * FROM idem_stores
), waiter AS MATERIALIZED (
	SELECT w.*, pg_catalog.pg_blocking_pids(w.pid) AS blockers
	FROM activity w
	WHERE w.waiting AND w.since < pg_catalog.clock_timestamp() - interval '5 seconds'
	ORDER BY w.since LIMIT 1
), finding(rank, severity, topic, store, detail, advice) AS (
	SELECT 5, 'notice', 'statistics', NULL::oid,
		'idem is not in shared_preload_libraries: nothing is counted',
		'Add idem to shared_preload_libraries and restart the server.'
	FROM status WHERE NOT preloaded
	UNION ALL
	SELECT 5, 'notice', 'statistics', NULL, 'idem.track is off: nothing is counted',
		'Set idem.track = on, unless that is meant.'
	FROM status WHERE preloaded AND NOT tracking
	UNION ALL
	SELECT 4, 'warning', 'counters', NULL,
		pg_catalog.format('%s answers were not counted, %s of %s places for stores are taken', overflowed, used, capacity),
		'Drop stores that are not needed, in all databases: claims are right all the same, but stores beyond these have no statistics.'
	FROM status WHERE overflowed > 0
	UNION ALL
	SELECT 3, 'warning', 'expiry', NULL, 'no worker: ' || pg_catalog.substr(w.worker, 7),
		'Start it, or let cron CALL idem_expire(): until then records only accumulate.'
	FROM (SELECT idem_worker_status() AS worker) w
	WHERE w.worker LIKE 'none: %' AND NOT pg_catalog.pg_is_in_recovery()
	UNION ALL
	SELECT 3, 'warning', 'expiry', s.store, pg_catalog.format('expiry is overdue by %s', pg_catalog.date_trunc('second', s.overdue)),
		'Look for old transactions, replication slots and locks on the store; CALL idem_expire(store) says what is in the way.'
	FROM stores s WHERE s.overdue > greatest(interval '1 hour', s.retention / 10) AND NOT pg_catalog.pg_is_in_recovery()
	UNION ALL
	SELECT 3, 'warning', 'expiry', s.store, 'expiry cannot go on: ' || s.trouble,
		'Remove the cause; it is tried again in every round.'
	FROM stores s WHERE s.trouble IS NOT NULL
	UNION ALL
	SELECT 1, 'critical', 'uncertain', u.store, pg_catalog.format('%s leases have run out, the oldest %s ago',
			pg_catalog.count(*), pg_catalog.date_trunc('second', pg_catalog.max(u.overdue))),
		'Find out for each row of idem_uncertain whether its effect happened, and call idem_resolve().'
	FROM idem_uncertain u GROUP BY u.store
	UNION ALL
	SELECT 2, 'warning', 'spike', s.store, pg_catalog.format('%s duplicates in a minute, the usual is %s', s.suppressed, s.baseline),
		'A client or job retries without end: idem_stat_keys shows its keys and user.'
	FROM (SELECT DISTINCT ON (store) * FROM idem_spikes
		WHERE minute >= pg_catalog.date_trunc('minute', pg_catalog.clock_timestamp()) - interval '5 minutes'
		ORDER BY store, minute DESC) s
	UNION ALL
	SELECT 2, 'warning', 'waiting', w.store, pg_catalog.format('session %s has waited %s for key %s, blocked by %s',
			w.pid, pg_catalog.date_trunc('second', pg_catalog.clock_timestamp() - w.since), w.key,
			CASE WHEN 0 = ANY (w.blockers) THEN 'a prepared transaction'
				ELSE pg_catalog.array_to_string(w.blockers, ', ') END),
		'Look at the blocking session in pg_stat_activity, or at pg_prepared_xacts; ending it lets the next waiter run the operation.'
	FROM waiter w
	UNION ALL
	SELECT 2, 'warning', 'idle holder', a.store, pg_catalog.format('session %s holds %s and is %s since %s',
			a.pid, a.key, a.state, pg_catalog.date_trunc('second', a.state_change)),
		'Its client does something slow or has left inside the transaction: use a lease for work outside the database; idle_in_transaction_session_timeout ends it.'
	FROM activity a
	WHERE NOT a.waiting AND a.state LIKE 'idle in transaction%'
		AND a.state_change < pg_catalog.clock_timestamp() - interval '10 seconds'
	UNION ALL
	SELECT 4, 'notice', 'random keys', c.store,
		pg_catalog.format('%s operations and not one duplicate; most keys are bare random values', c.executed),
		'A key must name the operation, not the attempt: make it from what the request is about, see idem_key().'
	FROM idem_stat_counters(false) c
	WHERE c.executed >= 1000 AND c.suppressed = 0 AND c.keys_random * 2 > c.keys_sampled
	UNION ALL
	SELECT 4, 'notice', 'personal data', c.store,
		pg_catalog.format('%s of %s keys looked at hold an e-mail address', c.keys_email, c.keys_sampled),
		'Keys are logged and shown in views: use an identifier of the customer instead.'
	FROM idem_stat_counters(false) c WHERE c.keys_email > 0
)
SELECT f.severity, f.topic, f.store::pg_catalog.regclass AS store, f.detail, f.advice
FROM (
	SELECT * FROM finding
	UNION ALL
	SELECT 9, 'ok', 'all', NULL, 'nothing deserves attention', 'Nothing needs to be done.'
	WHERE NOT EXISTS (SELECT FROM finding)
) f
ORDER BY f.rank, f.topic, f.store;

COMMENT ON VIEW idem_health IS
'a row for each thing that deserves attention now, the most urgent first, and what to do about it';

-- Keys and fingerprints

CREATE FUNCTION idem_key(VARIADIC parts "any")
RETURNS text
AS 'MODULE_PATHNAME', 'idem_key'
LANGUAGE C IMMUTABLE PARALLEL SAFE;

COMMENT ON FUNCTION idem_key("any") IS
'joins text, integer, uuid, boolean and enum parts into a key, without ambiguity';

CREATE FUNCTION idem_provider_key(key text, provider text DEFAULT '')
RETURNS uuid
AS 'MODULE_PATHNAME', 'idem_provider_key'
LANGUAGE C IMMUTABLE PARALLEL SAFE;

COMMENT ON FUNCTION idem_provider_key(text, text) IS
'the identity of an operation to hand to its destination: a UUIDv5 of provider and key';

CREATE FUNCTION idem_fingerprint(request jsonb)
RETURNS uuid
AS 'MODULE_PATHNAME', 'idem_fingerprint'
LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION idem_fingerprint(jsonb) IS
'what a claim stores for a request: a UUIDv8 of its canonical form';

-- Privileges: nobody but the owner has any by default

CREATE FUNCTION idem_revoke_default_privileges()
RETURNS integer
AS 'MODULE_PATHNAME', 'idem_revoke_default_privileges'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

SELECT @extschema@.idem_revoke_default_privileges();
DROP FUNCTION idem_revoke_default_privileges();

GRANT SELECT ON idem_store_state, idem_stores, idem_uncertain, idem_history, idem_stat,
	idem_stat_keys, idem_in_flight, idem_spikes, idem_health TO PUBLIC;
