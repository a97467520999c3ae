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
	watermark timestamptz
);

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
GRANT SELECT ON idem_store_state TO PUBLIC;

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
'stores the result, which must be valid JSON, under the claim held by this transaction, and returns it';

CREATE FUNCTION idem_complete(key text, result anyelement, token bigint DEFAULT NULL,
	store regclass DEFAULT 'idem_completions')
RETURNS json
AS 'MODULE_PATHNAME', 'idem_complete_any'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_complete(text, anyelement, bigint, regclass) IS
'stores the result under the claim held by this transaction, and returns it: json and jsonb as they print, other types through to_json()';

CREATE FUNCTION idem_release(key text, token bigint DEFAULT NULL, store regclass DEFAULT 'idem_completions')
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_release'
LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;

COMMENT ON FUNCTION idem_release(text, bigint, regclass) IS
'gives up a claim: nothing was done, a retry may run; false when nothing is held';

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
