--
-- What an owner can add to a store: columns, indexes, triggers, constraints.
-- They are honoured, or the completion is an error; never a silent success.
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
\set VERBOSITY sqlstate

CREATE SCHEMA changes_test;
SET search_path = changes_test, public;
SELECT idem_create_store('store', '1 day', 2);
CREATE TABLE effect (key text);
CREATE FUNCTION work(k text, r text DEFAULT '"done"') RETURNS text LANGUAGE plpgsql AS $$
DECLARE c idem_outcome;
BEGIN
	c := idem_claim(k, store => 'store');
	IF c.claimed THEN
		INSERT INTO effect VALUES (k);
		RETURN 'did ' || idem_complete(k, r, store => 'store')::text;
	END IF;
	RETURN c.status || ' ' || c.result::text;
END $$;
SELECT work('plain'), work('plain');

-- Columns: a default counts, NOT NULL counts, a generated one is generated
ALTER TABLE store ADD COLUMN note text DEFAULT 'a note';
SELECT work('note'), work('note');
ALTER TABLE store ADD COLUMN required int NOT NULL DEFAULT 7;
SELECT work('required'), work('required');
ALTER TABLE store ADD COLUMN twice text GENERATED ALWAYS AS (key || key) STORED;
SELECT work('generated'), work('generated');
ALTER TABLE store ADD COLUMN made_by name DEFAULT current_user;
ALTER TABLE store ADD COLUMN made_in xid8 DEFAULT pg_current_xact_id();
CREATE SEQUENCE numbers;
ALTER TABLE store ADD COLUMN number bigint DEFAULT nextval('changes_test.numbers');
SELECT setval('numbers', 100);
SELECT work('volatile'), work('volatile');
SELECT key, note, required, twice, made_by = current_user AS made_by, number, result FROM store ORDER BY 1;
-- ... without a default it is an error, and nothing was done
ALTER TABLE store ALTER COLUMN required DROP DEFAULT;
SELECT work('no default');
SELECT count(*) FROM effect WHERE key = 'no default';
SELECT count(*) FROM idem_lookup('no default', 'store');
ALTER TABLE store DROP COLUMN required;
SELECT work('no default'), work('no default');
-- ... what a released record had there is kept, in place and when it is moved
INSERT INTO store (key, status, generation, note, number) VALUES ('kept', 'released', 0, 'kept', 1), ('moved', 'released', 1, 'moved', 2);
SELECT work('kept'), work('moved');
SELECT work('kept'), work('moved');
SELECT key, status, generation, note, number, twice FROM store WHERE key IN ('kept', 'moved') ORDER BY 1;
-- ... a default that depends on the partition, a domain, a column that one partition has first
CREATE DOMAIN short AS text CHECK (length(value) < 10);
ALTER TABLE store ADD COLUMN s short DEFAULT 'short';
ALTER TABLE store_0 ALTER COLUMN note SET DEFAULT 'a note of store_0';
SELECT work('by partition');
SELECT note, s FROM store WHERE key = 'by partition';
ALTER TABLE store_0 ALTER COLUMN s SET DEFAULT 'too long for this';
SELECT work('bad domain');
ALTER TABLE store DROP COLUMN note, DROP COLUMN twice, DROP COLUMN made_by, DROP COLUMN made_in, DROP COLUMN number, DROP COLUMN s;
SELECT work('bare again'), work('bare again');

-- Partitions with different attribute numbers
ALTER TABLE store DETACH PARTITION store_1;
DROP TABLE store_1;
CREATE TABLE store_1 (generation int2 NOT NULL, junk1 text, result json, checkpoint jsonb, fingerprint uuid, junk2 int,
	claimed_by text, lease_until timestamptz, completed_at timestamptz, claimed_at timestamptz, token int8,
	attempts int4, status text NOT NULL, key text COLLATE "C" NOT NULL, extra text);
INSERT INTO store_1 (key, status, attempts, generation, extra) VALUES ('from 1', 'released', 4, 1, 'extra');
ALTER TABLE store_1 DROP COLUMN junk1, DROP COLUMN junk2;
ALTER TABLE store ADD COLUMN extra text;
ALTER TABLE store_1 ADD CONSTRAINT idem_check CHECK (idem_check(key, status, generation, 2));
CREATE UNIQUE INDEX ON store_1 (key);
ALTER TABLE store ATTACH PARTITION store_1 FOR VALUES IN (1);
INSERT INTO store (key, status, result, generation) VALUES ('in 1', 'completed', '{"b":1.10}', 1);
SELECT work('in 1'), work('from 1'), work('from 1'), work('in 0'), work('in 0');
SELECT key, status, attempts, generation, extra, result FROM store WHERE key IN ('in 1', 'from 1', 'in 0') ORDER BY 1;
SELECT idem_forget('in 1', 'store'), idem_forget('from 1', 'store');
SELECT status, result FROM idem_lookup('in 1', 'store');
ALTER TABLE store DROP COLUMN extra;

-- Indexes of the owner's are maintained, by look-ups of which they are used
CREATE INDEX by_result ON store ((result ->> 'id'));
CREATE INDEX by_hash ON store USING hash (key);
CREATE INDEX by_status ON store_0 (status, completed_at) WHERE status <> 'completed';
CREATE INDEX by_generation ON store_0 USING brin (completed_at, claimed_at);
SELECT work('indexed', '{"id": "x1"}'), work('indexed');
INSERT INTO store (key, status) VALUES ('indexed released', 'released');
SELECT work('indexed released', '{"id": "x2"}');
SET enable_seqscan = off;
SELECT key FROM store WHERE result ->> 'id' = 'x1';
SELECT key FROM store WHERE result ->> 'id' = 'x2';
SELECT count(*) FROM store_0 WHERE status = 'released';
RESET enable_seqscan;
-- ... a unique one of theirs that is violated is its own error
CREATE UNIQUE INDEX unique_id ON store_0 ((result ->> 'id'));
SELECT work('same id', '{"id": "x1"}');
SELECT count(*) FROM effect WHERE key = 'same id';
DROP INDEX by_result, by_hash, by_status, by_generation, unique_id;
-- ... a second unique index on key, an exclusion constraint
CREATE UNIQUE INDEX key_again ON store_0 (key);
ALTER TABLE store_0 ADD CONSTRAINT key_excluded EXCLUDE USING btree (key WITH =);
SELECT work('again'), work('again');
BEGIN;
SELECT claimed FROM idem_claim('by hand', store => 'store');
INSERT INTO store (key) VALUES ('by hand');
SELECT idem_complete('by hand', store => 'store');
ROLLBACK;
ALTER TABLE store_0 DROP CONSTRAINT key_excluded;
DROP INDEX key_again;

-- Constraints
ALTER TABLE store ADD CONSTRAINT small CHECK (length(result::text) < 20);
SELECT work('small', '"small"'), work('small');
SELECT work('large', '"' || repeat('x', 20) || '"');
SELECT count(*) FROM effect WHERE key = 'large';
ALTER TABLE store DROP CONSTRAINT small;
ALTER TABLE store ALTER COLUMN result SET NOT NULL;
SELECT work('no null', 'null'), work('no null');
SELECT work('null', NULL);
SELECT idem_once('null', store => 'store');
ALTER TABLE store ALTER COLUMN result DROP NOT NULL;
CREATE TABLE known_key (key text COLLATE "C" PRIMARY KEY);
INSERT INTO known_key VALUES ('known');
ALTER TABLE store_0 ADD CONSTRAINT known FOREIGN KEY (key) REFERENCES known_key NOT VALID;
SELECT work('known'), work('known');
SELECT work('unknown');
SELECT count(*) FROM effect WHERE key = 'unknown';
ALTER TABLE store_0 DROP CONSTRAINT known;
ALTER TABLE store_0 ADD CONSTRAINT known FOREIGN KEY (key) REFERENCES known_key DEFERRABLE INITIALLY DEFERRED NOT VALID;
SELECT work('unknown');
SELECT count(*) FROM effect WHERE key = 'unknown';
BEGIN;
SELECT work('deferred');
INSERT INTO known_key VALUES ('deferred');
COMMIT;
SELECT work('deferred');
ALTER TABLE store_0 DROP CONSTRAINT known;
-- ... a foreign key that points here
CREATE TABLE refers (key text COLLATE "C" REFERENCES store_0 (key));
SELECT work('referred to'), work('not referred to');
INSERT INTO refers VALUES ('referred to');
SELECT idem_forget('referred to', 'store');
SELECT idem_forget('not referred to', 'store');
DROP TABLE refers;

-- Triggers: a BEFORE trigger that swallows the row
CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER t BEFORE INSERT ON store FOR EACH ROW EXECUTE FUNCTION swallow();
SELECT work('swallowed');
SELECT idem_once('swallowed', store => 'store');
SELECT count(*) FROM effect WHERE key = 'swallowed';
\set VERBOSITY default
SELECT idem_once('swallowed', store => 'store');
\set VERBOSITY sqlstate
-- ... or the update of it, or the deletion where it was
INSERT INTO store (key, status, generation) VALUES ('nothing', 'released', 0);
ALTER TABLE store DISABLE TRIGGER t;
SELECT work('not swallowed'), work('not swallowed');
INSERT INTO store (key, status, generation) VALUES ('released 0', 'released', 0), ('released 1', 'released', 1);
ALTER TABLE store ENABLE TRIGGER t;
SELECT work('released 0'), work('released 0');
SELECT work('released 1');
SELECT status, generation FROM store WHERE key = 'released 1';
DROP TRIGGER t ON store;
CREATE TRIGGER t BEFORE UPDATE OR DELETE ON store FOR EACH ROW EXECUTE FUNCTION swallow();
SELECT work('released 1');
SELECT idem_forget('released 1', 'store');
INSERT INTO store (key, status, generation) VALUES ('released 00', 'released', 0);
SELECT work('released 00');
SELECT key, status, generation FROM store WHERE key LIKE 'released%' ORDER BY 1;
DROP TRIGGER t ON store;
-- ... one that only swallows some
CREATE FUNCTION swallow_some() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF NEW.key LIKE 'swallow%' THEN
		RETURN NULL;
	END IF;
	RETURN NEW;
END $$;
CREATE TRIGGER t BEFORE INSERT ON store FOR EACH ROW EXECUTE FUNCTION swallow_some();
SELECT work('kept'), work('passes'), work('passes');
SELECT work('swallow me');
DROP TRIGGER t ON store;

-- ... one that changes what is stored: the changed result is the answer
CREATE FUNCTION change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	CASE NEW.key
		WHEN 'result' THEN NEW.result := json_build_object('wrapped', NEW.result);
		WHEN 'no result' THEN NEW.result := NULL;
		WHEN 'other key' THEN NEW.key := 'another key';
		WHEN 'status' THEN NEW.status := 'released';
		WHEN 'leased' THEN NEW.status := 'leased';
		WHEN 'bad status' THEN NEW.status := 'whatever';
		WHEN 'generation' THEN NEW.generation := 1;
		WHEN 'time' THEN NEW.completed_at := '2020-01-01 00:00+00';
		WHEN 'attempts' THEN NEW.attempts := NULL;
		ELSE
	END CASE;
	RETURN NEW;
END $$;
CREATE TRIGGER t BEFORE INSERT ON store FOR EACH ROW EXECUTE FUNCTION change();
SELECT work('result'), work('result');
SELECT work('no result'), work('no result');
SELECT result FROM idem_lookup('result', 'store');
SELECT work('time'), work('attempts');
SELECT completed_at = '2020-01-01 00:00+00' AS changed FROM idem_claim('time', store => 'store');
SELECT work('other key');
SELECT work('status');
SELECT work('leased');
SELECT work('bad status');
SELECT work('generation');
SELECT key, count(*) FROM effect WHERE key IN ('other key', 'another key', 'status', 'leased', 'bad status', 'generation') GROUP BY 1;
SELECT key FROM store WHERE key IN ('other key', 'another key', 'status', 'leased', 'bad status', 'generation');
DROP TRIGGER t ON store;

-- ... AFTER triggers: fired once, seeing the row; what they raise counts
CREATE TABLE log (key text, op text, seen bigint, old_status text, new_status text);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF TG_OP = 'DELETE' THEN
		INSERT INTO log VALUES (OLD.key, TG_OP, (SELECT count(*) FROM store WHERE key = OLD.key), OLD.status, NULL);
	ELSIF TG_OP = 'UPDATE' THEN
		INSERT INTO log VALUES (NEW.key, TG_OP, (SELECT count(*) FROM store WHERE key = NEW.key), OLD.status, NEW.status);
	ELSE
		INSERT INTO log VALUES (NEW.key, TG_OP, (SELECT count(*) FROM store WHERE key = NEW.key), NULL, NEW.status);
	END IF;
	IF NEW.key = 'after fails' THEN
		RAISE division_by_zero;
	END IF;
	RETURN NULL;
END $$;
INSERT INTO store (key, status, generation) VALUES ('after update', 'released', 0), ('after move', 'released', 1);
CREATE TRIGGER t AFTER INSERT OR UPDATE OR DELETE ON store FOR EACH ROW EXECUTE FUNCTION note();
SELECT work('after'), work('after');
SELECT work('after update'), work('after update');
SELECT work('after move'), work('after move');
SELECT work('after fails');
SELECT idem_forget('after', 'store');
SELECT * FROM log ORDER BY key, op;
SELECT count(*) FROM effect WHERE key = 'after fails';
TRUNCATE log;
-- ... with a condition, for a column, or at the end of the transaction
DROP TRIGGER t ON store;
CREATE TRIGGER t1 AFTER INSERT ON store FOR EACH ROW WHEN (NEW.key LIKE 'when%') EXECUTE FUNCTION note();
CREATE TRIGGER t2 AFTER UPDATE OF result ON store FOR EACH ROW EXECUTE FUNCTION note();
CREATE CONSTRAINT TRIGGER t3 AFTER INSERT ON store DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (NEW.key LIKE 'later%') EXECUTE FUNCTION note();
INSERT INTO store (key, status) VALUES ('of result', 'released');
SELECT work('when'), work('not'), work('of result');
BEGIN;
SELECT work('later');
SELECT count(*) FROM log WHERE key = 'later';
COMMIT;
SELECT * FROM log ORDER BY key, op;
DROP TRIGGER t1 ON store;
DROP TRIGGER t2 ON store;
DROP TRIGGER t3 ON store;
-- ... an AFTER trigger that takes the row away again, or touches it
CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF NEW.key = 'taken away' THEN
		DELETE FROM store WHERE key = NEW.key;
	ELSIF NEW.key = 'forgotten' THEN
		PERFORM idem_forget(NEW.key, 'store');
	ELSIF NEW.key = 'touched' THEN
		UPDATE store SET result = '"touched"' WHERE key = NEW.key;
	ELSIF NEW.key = 'doubled' THEN
		INSERT INTO store (key, generation) VALUES (NEW.key, 1) ON CONFLICT DO NOTHING;
	ELSIF NEW.key = 'asks' THEN
		INSERT INTO log SELECT NEW.key, status FROM idem_try_claim(NEW.key, store => 'store');
	ELSIF NEW.key = 'nests' THEN
		INSERT INTO log VALUES (NEW.key, work('nested'));
	END IF;
	RETURN NULL;
END $$;
CREATE TRIGGER t AFTER INSERT ON store FOR EACH ROW WHEN (pg_trigger_depth() < 2) EXECUTE FUNCTION meddle();
TRUNCATE log;
SELECT work('taken away');
SELECT work('forgotten');
SELECT work('touched'), work('touched');
SELECT work('doubled');
SELECT work('nests'), work('nests'), work('nested');
SELECT work('asks'), work('asks');
SELECT count(*) FROM effect WHERE key IN ('taken away', 'forgotten', 'doubled');
SELECT key, op FROM log;
DROP TRIGGER t ON store;
-- ... triggers that are disabled, or for replicas only, do not fire
CREATE TRIGGER t BEFORE INSERT ON store FOR EACH ROW EXECUTE FUNCTION swallow();
ALTER TABLE store_0 DISABLE TRIGGER t;
SELECT work('disabled'), work('disabled');
ALTER TABLE store_0 ENABLE REPLICA TRIGGER t;
SELECT work('replica'), work('replica');
SET session_replication_role = replica;
SELECT work('replica 2');
RESET session_replication_role;
ALTER TABLE store_0 ENABLE ALWAYS TRIGGER t;
SELECT work('always');
DROP TRIGGER t ON store;
-- ... a trigger as pg_repack adds one, on a partition alone
CREATE TRIGGER t AFTER INSERT OR UPDATE OR DELETE ON store_0 FOR EACH ROW EXECUTE FUNCTION note();
SELECT work('repack'), work('repack');
SELECT idem_forget('repack', 'store');
SELECT key, op, seen FROM log WHERE key = 'repack' ORDER BY 1, 2;
DROP TRIGGER t ON store_0;

-- DDL between claim and complete, in the same transaction
BEGIN;
SELECT claimed FROM idem_claim('ddl', store => 'store');
ALTER TABLE store ADD COLUMN late text NOT NULL DEFAULT 'late';
CREATE INDEX late ON store (late);
CREATE TRIGGER t AFTER INSERT ON store FOR EACH ROW EXECUTE FUNCTION note();
SELECT idem_complete('ddl', '1', store => 'store');
SELECT late, (SELECT count(*) FROM log WHERE key = 'ddl') FROM store WHERE key = 'ddl';
ALTER TABLE store DROP COLUMN late;
DROP TRIGGER t ON store;
SELECT idem_once('ddl 2', store => 'store');
TRUNCATE store;
SELECT status FROM idem_try_claim('ddl 3', store => 'store');
SELECT idem_complete('ddl 3', '3', store => 'store');
COMMIT;
SELECT key, result FROM store;
BEGIN;
SELECT claimed FROM idem_claim('ddl 4', store => 'store');
DROP INDEX store_0_key_idx;
SELECT idem_complete('ddl 4', '1', store => 'store');
ROLLBACK;
BEGIN;
SELECT claimed FROM idem_claim('ddl 4', store => 'store');
ALTER TABLE store DETACH PARTITION store_1;
SELECT idem_complete('ddl 4', '1', store => 'store');
ROLLBACK;
BEGIN;
SELECT claimed FROM idem_claim('ddl 4', store => 'store');
DROP TABLE store;
SELECT idem_complete('ddl 4', '1', store => 'store');
ROLLBACK;
BEGIN;
SELECT claimed FROM idem_claim('ddl 4', store => 'store');
DROP TABLE store;
COMMIT;
BEGIN;
SELECT claimed FROM idem_claim('ddl 4', store => 'store');
SELECT idem_release('ddl 4', store => 'store');
DROP TABLE store;
ROLLBACK;
SELECT work('after ddl'), work('after ddl');
-- ... a table that was rewritten, clustered, vacuumed, reindexed
VACUUM (FULL) store;
SELECT work('after ddl'), work('after vacuum');
CLUSTER store_0 USING store_0_key_idx;
REINDEX TABLE CONCURRENTLY store_0;
SELECT work('after vacuum'), work('after cluster');
ALTER TABLE store ALTER COLUMN attempts TYPE int USING attempts + 0;
VACUUM (FREEZE) store;
SELECT work('after cluster'), work('after freeze'), work('after freeze');

RESET search_path;
SET client_min_messages = error;
DROP SCHEMA changes_test CASCADE;
