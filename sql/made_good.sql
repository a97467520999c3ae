--
-- Beyond half of max_locks_per_transaction a row stands for the claim.  What
-- the transaction itself does to that row, to its partition and around it, must
-- not give the key a second record or none
--
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idem CASCADE;
CREATE EXTENSION idem;
\set VERBOSITY sqlstate

CREATE SCHEMA good_test;
SET search_path = good_test, public;
SELECT idem_create_store('made', '1 day', 3);
CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';

-- What becomes of it, told after each
PREPARE complete AS SELECT idem_complete('k', '"done"', store => 'made');
PREPARE record AS SELECT tableoid::regclass AS place, status, attempts, result FROM made WHERE key = 'k' ORDER BY 1;

BEGIN;
SELECT count(*) = current_setting('max_locks_per_transaction')::int AS all_claimed
FROM generate_series(1, current_setting('max_locks_per_transaction')::int) AS n,
	idem_claim('fill ' || n, store => 'made') WHERE claimed;
SELECT claimed FROM idem_claim('k', store => 'made');
EXECUTE record;
SAVEPOINT s;

-- Nothing
EXECUTE complete;
EXECUTE record;
ROLLBACK TO s;

-- The row
UPDATE made SET attempts = NULL WHERE key = 'k';
EXECUTE complete;
EXECUTE record;
ROLLBACK TO s;
UPDATE made SET attempts = 7 WHERE key = 'k';
EXECUTE complete;
EXECUTE record;
ROLLBACK TO s;
UPDATE made SET key = 'other' WHERE key = 'k';
EXECUTE complete;
ROLLBACK TO s;
UPDATE made SET generation = 1 WHERE key = 'k';
EXECUTE complete;
ROLLBACK TO s;
DELETE FROM made WHERE key = 'k';
EXECUTE complete;
ROLLBACK TO s;
DELETE FROM made WHERE key = 'k';
INSERT INTO made (key, status) VALUES ('k', 'released');
EXECUTE complete;
EXECUTE record;
ROLLBACK TO s;
DELETE FROM made WHERE key = 'k';
INSERT INTO made (key) VALUES ('k');
EXECUTE complete;
ROLLBACK TO s;

-- A second one
INSERT INTO made (key, generation) VALUES ('k', 1);
EXECUTE complete;
ROLLBACK TO s;

-- The partition
TRUNCATE made_0;
EXECUTE complete;
ROLLBACK TO s;
TRUNCATE made_0;
INSERT INTO made (key) SELECT 'else ' || n FROM generate_series(1, 1000) AS n;
EXECUTE complete;
ROLLBACK TO s;
CREATE TABLE kept AS SELECT key FROM made_0;
TRUNCATE made_0;
INSERT INTO made (key, status, attempts) SELECT key, 'released', NULL FROM kept;
EXECUTE complete;
EXECUTE record;
ROLLBACK TO s;
DELETE FROM made WHERE key <> 'k';
CLUSTER made_0 USING made_0_key_idx;
EXECUTE complete;
EXECUTE record;
ROLLBACK TO s;
REINDEX TABLE made_0;
EXECUTE complete;
EXECUTE record;
ROLLBACK TO s;

-- It is not plain any more
CREATE INDEX extra ON made_0 (attempts);
EXECUTE complete;
SET LOCAL enable_seqscan = off;
SELECT key, result FROM made_0 WHERE attempts = 1 AND status = 'completed';
ROLLBACK TO s;
ALTER TABLE made ADD CHECK (result IS NULL);
EXECUTE complete;
ROLLBACK TO s;
CREATE TRIGGER swallow BEFORE UPDATE ON made FOR EACH ROW EXECUTE FUNCTION swallow();
EXECUTE complete;
ROLLBACK TO s;

-- Another generation is the current one
UPDATE idem_store_state SET current = 1 WHERE store = 'made'::regclass;
ALTER TABLE made ALTER attempts SET DEFAULT 1;
EXECUTE complete;
EXECUTE record;
ROLLBACK TO s;

-- After all that: as if nothing had been
EXECUTE complete;
SELECT count(idem_complete('fill ' || n, n, store => 'made')) = max(n) AS all_completed
FROM generate_series(1, current_setting('max_locks_per_transaction')::int) AS n;
COMMIT;
EXECUTE record;
SELECT status, count(*) = current_setting('max_locks_per_transaction')::int + 1 AS all_there FROM made GROUP BY 1;

DEALLOCATE complete;
DEALLOCATE record;
RESET search_path;
DROP SCHEMA good_test CASCADE;
