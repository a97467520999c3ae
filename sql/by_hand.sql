--
-- What was changed by hand in a store or in the bookkeeping: it is borne, or
-- refused with a reason, and never changes an answer
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idem CASCADE;
CREATE EXTENSION idem;
\set VERBOSITY sqlstate

CREATE SCHEMA hand_test;
SET search_path = hand_test, public;
SELECT idem_create_store('store', '1 day', 3);
CREATE FUNCTION status_of(key text) RETURNS text LANGUAGE sql AS $$
	SELECT status FROM idem_try_claim(key, store => 'store') $$;

-- A key that stands twice: the later one counts, one without a time is older than any
INSERT INTO store (key, result, completed_at, generation) VALUES
	('none first', '"none"', NULL, 0), ('none first', '"1999"', '1999-01-01', 2),
	('none last', '"1999"', '1999-01-01', 0), ('none last', '"none"', NULL, 2),
	('none twice', '"first"', NULL, 0), ('none twice', '"second"', NULL, 2);
SELECT key, o.status, o.result FROM unnest(ARRAY['none first', 'none last', 'none twice']) AS key,
	idem_claim(key, store => 'store') AS o;

-- The CHECK constraint, as anybody may call it: NULLs are not its business
SELECT idem_check('k', 'completed', 0::int2, 4) AS good, idem_check('k', 'odd', 0::int2, 4) AS odd,
	idem_check('', 'completed', 0::int2, 4) AS bad_key, idem_check('k', 'completed', 4::int2, 4) AS no_generation,
	idem_check(NULL, 'completed', 0::int2, 4), idem_check('k', NULL, 0::int2, 4),
	idem_check('k', 'completed', NULL, 4), idem_check('k', 'completed', 0::int2, NULL);

-- Without it a record can have a status that nobody knows: an error, whoever asks
ALTER TABLE store DROP CONSTRAINT idem_check;
INSERT INTO store (key, status) VALUES ('odd', 'odd');
\set VERBOSITY default
SELECT status_of('odd');
\set VERBOSITY sqlstate
SELECT idem_lookup('odd', 'store');
SELECT idem_forget('odd', 'store');
SELECT idem_once('even', store => 'store');
DELETE FROM store WHERE key = 'odd';
SELECT idem_once('odd', store => 'store');

-- Constraints of the owner's by functions with as many arguments, and by none
CREATE FUNCTION always(text, text, int2, int) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT $1 <> ''never''';
ALTER TABLE store ADD CONSTRAINT of_owner CHECK (always(key, status, generation, 3)),
	ADD CONSTRAINT constant CHECK (idem_check(key, status, generation, 2 + 1) AND true);
SELECT idem_once('sometimes', store => 'store');
SELECT idem_once('never', store => 'store');
ALTER TABLE store DROP CONSTRAINT of_owner, DROP CONSTRAINT constant;

-- Partial indexes on lease_until that are not the one for leases are maintained
CREATE INDEX lease_and ON store_0 (lease_until) WHERE status = 'leased' AND token IS NOT NULL;
CREATE INDEX lease_is ON store_0 (lease_until) WHERE token IS NOT NULL;
CREATE INDEX lease_greater ON store_0 (lease_until) WHERE status > 'leased';
CREATE INDEX lease_other ON store_0 (lease_until) WHERE status = 'completed';
SELECT claimed, status FROM idem_lease('leased', store => 'store');
SELECT idem_once('completed', store => 'store');
SET enable_seqscan = off;
SELECT key FROM store_0 WHERE status = 'leased' AND token IS NOT NULL AND lease_until > now();
SELECT key FROM store_0 WHERE token IS NOT NULL AND lease_until > now();
SELECT count(*) FROM store_0 WHERE status > 'leased' AND lease_until IS NULL;
SELECT count(*) = (SELECT count(*) FROM store_0 WHERE status || '' = 'completed') AS all_there
FROM store_0 WHERE status = 'completed' AND lease_until IS NULL;
RESET enable_seqscan;
DROP INDEX lease_and, lease_is, lease_greater, lease_other;
ALTER TABLE store ADD CONSTRAINT idem_check CHECK (idem_check(key, status, generation, 3));

-- Bookkeeping that names a generation that is not there counts for nothing
UPDATE idem_store_state SET current = 99 WHERE store = 'store'::regclass;
SELECT idem_generation('store'), idem_generation('store_0');
INSERT INTO store (key) VALUES ('plain');
SELECT idem_once('claimed', store => 'store'), idem_once('plain', store => 'store');
SELECT key, tableoid::regclass FROM store WHERE key IN ('plain', 'claimed') ORDER BY 1;
UPDATE idem_store_state SET current = -1 WHERE store = 'store'::regclass;
SELECT idem_generation('store');
UPDATE idem_store_state SET current = 1 WHERE store = 'store'::regclass;
SELECT idem_generation('store'), idem_generation('idem_store_state'), idem_generation(0);

-- A note of a sealing counts for the file it was made for
SELECT states FROM idem_stores WHERE store = 'store'::regclass;
UPDATE idem_store_state SET sealed_at[1] = now(), sealed_xid[1] = '1', sealed_file[1] = pg_relation_filenode('store_0')
WHERE store = 'store'::regclass;
SELECT states FROM idem_stores WHERE store = 'store'::regclass;
VACUUM FULL store_0;
SELECT states FROM idem_stores WHERE store = 'store'::regclass;
ALTER TABLE idem_store_state ALTER sealed_at DROP NOT NULL;
UPDATE idem_store_state SET sealed_at = NULL WHERE store = 'store'::regclass;
SELECT states FROM idem_stores WHERE store = 'store'::regclass;
UPDATE idem_store_state SET sealed_at = '{}';
ALTER TABLE idem_store_state ALTER sealed_at SET NOT NULL;

-- A table that nobody expires is left alone, and no row is made for it
CREATE TABLE no_store (generation int2) PARTITION BY LIST (generation);
CALL idem_expire('no_store');
SELECT count(*) FROM idem_store_state WHERE store_name = 'no_store';

-- A table that Citus has distributed is refused.  Citus is not at hand here, so
-- this shows only what follows from its catalog of such tables.
SET allow_system_table_mods = on;
CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass, partmethod "char");
RESET allow_system_table_mods;
SELECT idem_create_store('local');
INSERT INTO pg_dist_partition VALUES (NULL), ('store');
SELECT idem_once('local', store => 'local');
ALTER TABLE store ALTER attempts SET DEFAULT 1;
\set VERBOSITY default
SELECT idem_once('distributed', store => 'store');
\set VERBOSITY sqlstate
SELECT idem_lookup('distributed', 'store');
SELECT idem_set_retention('2 days', 'store');
SET allow_system_table_mods = on;
ALTER TABLE pg_dist_partition DROP COLUMN logicalrelid;
ALTER TABLE store ALTER attempts SET DEFAULT 1;
SELECT idem_once('no such column', store => 'store');
DROP TABLE pg_dist_partition;
RESET allow_system_table_mods;

-- The type of an outcome is of another version
BEGIN;
ALTER TYPE idem_outcome ADD ATTRIBUTE more text;
SELECT idem_claim('outcome', store => 'store');
ROLLBACK;
BEGIN;
ALTER TYPE idem_completion ADD ATTRIBUTE more text;
INSERT INTO store (key, status, lease_until) VALUES ('uncertain', 'leased', '2000-01-01');
SELECT idem_resolve('uncertain', false, store => 'store');
ROLLBACK;

-- What only the script of CREATE EXTENSION may call
CREATE FUNCTION revoke() RETURNS int AS '$libdir/idem', 'idem_revoke_default_privileges' LANGUAGE C;
SELECT revoke();

-- A bookkeeping table of an earlier version: said so, whatever needs it
ALTER EXTENSION idem DROP TABLE idem_store_state;
ALTER TABLE idem_store_state RENAME TO put_aside;
CREATE TABLE public.idem_store_state (store oid, schema_name name, store_name name, origin text, retention bigint);
\set VERBOSITY default
SELECT idem_create_store('early');
\set VERBOSITY sqlstate
SELECT idem_once('early', store => 'store');
INSERT INTO store (key) VALUES ('early');
SELECT * FROM idem_stores;
CALL idem_expire();

-- None at all: claims go on, nothing is expired, and nothing can be noted
DROP TABLE idem_store_state;
SELECT idem_once('none', store => 'store'), idem_once('none', store => 'store');
BEGIN;
SELECT status FROM idem_try_claim('old', first_sent => now() - interval '100 days', store => 'store');
SELECT idem_release('old', store => 'store');
COMMIT;
SELECT status FROM idem_try_claim('old', first_sent => now() - interval '100 days');
SELECT store, retention, states FROM idem_stores WHERE store <> 'local'::regclass ORDER BY 1;
SELECT idem_create_store('none');
SELECT idem_set_retention('2 days', 'store');
CALL idem_expire();
CALL idem_expire('store');

-- Without the extension a store is a table with its rows, and still a store
CREATE FUNCTION once(text, jsonb, regclass) RETURNS boolean AS '$libdir/idem', 'idem_once' LANGUAGE C;
CREATE FUNCTION create_store(text, interval, int) RETURNS text AS '$libdir/idem', 'idem_create_store' LANGUAGE C;
SET client_min_messages = error;
DROP EXTENSION idem CASCADE;
SELECT once('none', NULL, 'store'), once('nothing', NULL, 'store'), once('nothing', NULL, 'store');
SELECT create_store('none', '1 day', 3);

RESET search_path;
DROP TABLE put_aside;
DROP SCHEMA hand_test CASCADE;
