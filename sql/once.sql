--
-- idem_once(): claim and complete in one call
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

SELECT pg_get_function_identity_arguments(oid), prorettype::regtype,
	   provolatile, proisstrict, proparallel
FROM pg_proc WHERE proname = 'idem_once';

-- True the first time only, in one statement, one transaction, and later
SELECT idem_once('once:a'), idem_once('once:a');
SELECT idem_once('once:a'), idem_once('once:a', NULL, 'idem_completions');
BEGIN;
SELECT idem_once('once:b');
SELECT idem_once('once:b');
ROLLBACK;
SELECT idem_once('once:b');

-- It is a completion like any other, with no result
SELECT key, status, attempts, result, completed_at >= claimed_at AS in_order
FROM idem_lookup('once:a');
SELECT claimed, status, result FROM idem_claim('once:a');

-- The inbox: effects are made once, together with the record of the event
CREATE TABLE once_effect (event text, n int);
INSERT INTO once_effect SELECT 'evt_1', 1 WHERE idem_once('once:evt_1');
INSERT INTO once_effect SELECT 'evt_1', 2 WHERE idem_once('once:evt_1');
BEGIN;
INSERT INTO once_effect SELECT 'evt_2', 1 WHERE idem_once('once:evt_2');
ROLLBACK;
INSERT INTO once_effect SELECT 'evt_2', 2 WHERE idem_once('once:evt_2');
-- ... an effect that fails takes the record with it
INSERT INTO once_effect SELECT 'evt_3', 1 / 0 WHERE idem_once('once:evt_3');
INSERT INTO once_effect SELECT 'evt_3', 3 WHERE idem_once('once:evt_3');
-- ... many at once, some twice
INSERT INTO once_effect
SELECT 'evt_' || e, 4 FROM unnest('{3,4,5,4,6,5}'::int[]) AS e
WHERE idem_once('once:evt_' || e);
SELECT * FROM once_effect ORDER BY 1;
-- ... and as a statement with a condition for all of it
WITH first AS MATERIALIZED (SELECT idem_once('once:evt_7') AS first)
INSERT INTO once_effect SELECT 'evt_7', 5 FROM first WHERE first;
UPDATE once_effect SET n = n + 100 WHERE event = 'evt_7' AND idem_once('once:update');
UPDATE once_effect SET n = n + 100 WHERE event = 'evt_7' AND idem_once('once:update');
SELECT * FROM once_effect WHERE event = 'evt_7';

-- False for a held key, and the claim is still open then
BEGIN;
SELECT claimed FROM idem_claim('once:held');
SELECT idem_once('once:held');
SELECT idem_complete('once:held', '1');
SELECT idem_once('once:held');
COMMIT;
-- ... true after a release
BEGIN;
SELECT claimed FROM idem_claim('once:released');
SELECT idem_release('once:released');
SELECT idem_once('once:released');
-- a completion cannot be released, nor completed again
SELECT idem_release('once:released');
SELECT idem_complete('once:released', '1');
ROLLBACK;

-- The other states raise as idem_claim() does
SELECT idem_once('once:request', '{"n": 1}');
SELECT idem_once('once:request', '{"n": 1.0}');
SELECT idem_once('once:request');
SELECT idem_once('once:request', '{"n": 2}');
INSERT INTO idem_completions (key, status, lease_until)
VALUES ('once:leased', 'leased', 'infinity'),
	   ('once:lease_over', 'leased', '-infinity'),
	   ('once:skipped', 'skipped', NULL),
	   ('once:was_released', 'released', NULL);
SELECT idem_once('once:leased');
SELECT idem_once('once:lease_over');
SELECT idem_once('once:skipped');
SELECT idem_once('once:was_released'), idem_once('once:was_released');

-- A NULL or bad key is an error, never "not the first"
SELECT count(*) WHERE idem_once(NULL);
SELECT count(*) WHERE idem_once('');
SELECT count(*) WHERE idem_once(repeat('x', 513));
SELECT count(*) WHERE idem_once('once:a', store => NULL);

-- The same key in two stores is two keys
SELECT idem_create_store('once_other', '1 day', 2);
SELECT idem_once('once:a', store => 'once_other'), idem_once('once:a', store => 'once_other');
-- ... one statement, two stores, all four combinations
BEGIN;
SELECT s, k, idem_once(k, store => s)
FROM unnest('{once:x,once:y,once:x}'::text[]) AS k,
	 unnest('{once_other,idem_completions}'::regclass[]) AS s
ORDER BY s::text COLLATE "C", k COLLATE "C", 3 DESC;
ROLLBACK;

-- Read only is refused, also for a key that is there
BEGIN READ ONLY;
SELECT idem_once('once:a');
ROLLBACK;

SET client_min_messages = error;
DROP TABLE once_effect, once_other;
TRUNCATE idem_completions;
