--
-- Many keys in one transaction: far more than the shared lock table has room for
--
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;
TRUNCATE idem_completions;
\set VERBOSITY sqlstate

CREATE TABLE many_effect (n int);
CREATE VIEW many_locks AS
SELECT count(*) <= current_setting('max_locks_per_transaction')::int AS few_locks FROM pg_locks
WHERE pid = pg_backend_pid() AND locktype = 'advisory';

-- 100,000 claims, all completed in one statement
BEGIN;
SELECT count(*) FROM generate_series(1, 100000) AS i, LATERAL (SELECT claimed FROM idem_claim('many:' || i)) AS c WHERE claimed;
TABLE many_locks;
SELECT status, count(*) FROM generate_series(1, 100000, 100) AS i, LATERAL (SELECT * FROM idem_claim('many:' || i)) AS c GROUP BY 1;
INSERT INTO many_effect SELECT generate_series(1, 100000);
SELECT count(idem_complete('many:' || n, n)) FROM many_effect;
SELECT status, count(*), count(*) FILTER (WHERE result::text = i::text)
FROM generate_series(1, 100000, 100) AS i, LATERAL (SELECT * FROM idem_claim('many:' || i)) AS c GROUP BY 1;
TABLE many_locks;
COMMIT;
SELECT status, count(*), count(DISTINCT key), sum(attempts), sum(result::text::bigint) FROM idem_completions GROUP BY 1;
SELECT status, count(*), count(*) FILTER (WHERE result::text = i::text)
FROM generate_series(1, 100000, 7) AS i, LATERAL (SELECT * FROM idem_claim('many:' || i)) AS c GROUP BY 1;
TRUNCATE idem_completions;

-- ... in a batch, and completed in the statement that claims
BEGIN;
SELECT count(idem_complete(key, ordinality))
FROM idem_claim_batch((SELECT array_agg('many:' || i % 5000) FROM generate_series(1, 10000) AS i)) WHERE claimed;
TABLE many_locks;
COMMIT;
SELECT count(*), count(DISTINCT key), count(*) FILTER (WHERE status = 'completed') FROM idem_completions;
-- ... of which half is known already
SELECT status, count(idem_complete(key, ordinality)) FILTER (WHERE claimed), count(*)
FROM idem_claim_batch((SELECT array_agg('many:' || i) FROM generate_series(2500, 7499) AS i)) GROUP BY 1 ORDER BY 1;
SELECT count(*), count(DISTINCT key), count(*) FILTER (WHERE status = 'completed') FROM idem_completions;

-- idem_once() and idem_run() the same
SELECT count(*) FROM generate_series(1, 5000) AS i WHERE idem_once('once:' || i);
SELECT count(*) FROM generate_series(1, 5000) AS i WHERE idem_once('once:' || i);
CREATE FUNCTION many_handler(request jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT request $$;
SELECT claimed, count(*) FROM generate_series(1, 1000) AS i, LATERAL idem_run('run:' || i, 'many_handler', to_jsonb(i)) GROUP BY 1;
SELECT claimed, count(*) FROM generate_series(1, 1000) AS i, LATERAL idem_run('run:' || i, 'many_handler', to_jsonb(i)) WHERE result::text = i::text GROUP BY 1;
TRUNCATE idem_completions;

-- One that is left unfinished undoes all
BEGIN;
SELECT count(*) FROM generate_series(1, 1000) AS i, LATERAL (SELECT claimed FROM idem_claim('left:' || i)) AS c WHERE claimed;
SELECT count(idem_complete('left:' || i, i)) FROM generate_series(1, 999) AS i;
COMMIT;
SELECT count(*) FROM idem_completions;
\set VERBOSITY default
BEGIN;
SELECT count(*) FROM generate_series(1, 1000) AS i, LATERAL (SELECT claimed FROM idem_claim('left:' || i)) AS c WHERE claimed;
SELECT count(idem_complete('left:' || i, i)) FROM generate_series(2, 1000) AS i;
COMMIT;
\set VERBOSITY sqlstate
SELECT count(*) FROM idem_completions;

-- Claims beyond the limit behave like any other: held, released, claimed
-- again, forgotten, with a request, in savepoints
BEGIN;
SELECT count(*) FROM generate_series(1, 500) AS i, LATERAL (SELECT claimed FROM idem_claim('fill:' || i)) AS c WHERE claimed;
SELECT claimed, status FROM idem_claim('m:a', '[1]');
SELECT claimed, status FROM idem_claim('m:a', '[2]');
-- a plain look shows the row that stands for the claim
SELECT status FROM idem_lookup('m:a');
SAVEPOINT s;
SELECT idem_forget('m:a');
ROLLBACK TO s;
SELECT idem_release('m:a'), idem_release('m:a');
SELECT claimed, status FROM idem_claim('m:a', '[2]');
SAVEPOINT s;
SELECT idem_complete('m:a', '2');
SELECT status, result FROM idem_claim('m:a', '[2]');
SELECT status, result FROM idem_try_claim('m:a', '[1]');
ROLLBACK TO s;
SELECT claimed, status FROM idem_claim('m:a');
SELECT idem_release('m:a');
ROLLBACK TO s;
SELECT claimed, status FROM idem_claim('m:a');
SELECT idem_complete('m:a', '3');
SELECT idem_complete('m:a', '4');
ROLLBACK TO s;
SELECT idem_complete('m:a', '5');
SELECT idem_forget('m:a');
SELECT claimed, status FROM idem_claim('m:a', '[3]');
SELECT idem_complete('m:a', '6');
-- a claim in a savepoint that is rolled back
SAVEPOINT s2;
SELECT claimed, status FROM idem_claim('m:b');
ROLLBACK TO s2;
SELECT count(*) FROM idem_lookup('m:b');
SELECT claimed, status FROM idem_claim('m:b');
RELEASE s2;
SELECT claimed, status FROM idem_claim('m:b');
SELECT idem_complete('m:b');
-- ... released, and never claimed again
SELECT claimed, status FROM idem_claim('m:c');
SELECT idem_release('m:c');
SELECT count(idem_release('fill:' || i)) FROM generate_series(1, 500) AS i;
COMMIT;
SELECT status, result, attempts FROM idem_lookup('m:a');
SELECT status, result, attempts FROM idem_lookup('m:b');
-- what was released is claimable, and no record of anything done
BEGIN;
SELECT claimed, status FROM idem_claim('m:c');
SELECT status, count(*) FROM generate_series(1, 500) AS i, LATERAL (SELECT * FROM idem_try_claim('fill:' || i)) AS c GROUP BY 1;
ROLLBACK;
SELECT count(*) FILTER (WHERE status NOT IN ('completed', 'released')), count(*) FILTER (WHERE status = 'completed') FROM idem_completions;
SELECT count(*) FROM generate_series(1, 500) AS i WHERE idem_once('fill:' || i);
SELECT status, count(*) FROM idem_completions WHERE key LIKE 'fill:%' GROUP BY 1;

-- ... a released record of another generation is replaced, in a savepoint too
INSERT INTO idem_completions (key, status, attempts, generation) VALUES ('m:g2', 'released', 2, 2), ('m:g0', 'released', 2, 0);
BEGIN;
SELECT count(*) FROM generate_series(1, 200) AS i, LATERAL (SELECT claimed FROM idem_claim('again:' || i)) AS c WHERE claimed;
SAVEPOINT s;
SELECT claimed FROM idem_claim_batch('{m:g2,m:g0}');
ROLLBACK TO s;
SELECT key, status, attempts, generation FROM idem_completions WHERE key LIKE 'm:g_' ORDER BY 1;
SELECT claimed FROM idem_claim_batch('{m:g2,m:g0}');
SAVEPOINT s;
SELECT idem_complete('m:g2', '2'), idem_complete('m:g0', '0');
ROLLBACK TO s;
SELECT idem_complete('m:g2', '22'), idem_complete('m:g0', '00.0');
ROLLBACK TO s;
SELECT idem_complete('m:g2', '22'), idem_complete('m:g0', '0.0');
SELECT count(idem_complete('again:' || i)) FROM generate_series(1, 200) AS i;
COMMIT;
SELECT key, status, attempts, result, generation FROM idem_completions WHERE key LIKE 'm:g_' ORDER BY 1;

-- ... a row by hand takes the place of one that stood for a claim
BEGIN;
SELECT count(*) FROM generate_series(1, 200) AS i, LATERAL (SELECT claimed FROM idem_claim('hand:' || i)) AS c WHERE claimed;
DELETE FROM idem_completions WHERE key = 'hand:200';
SAVEPOINT s;
SELECT idem_complete('hand:200');
ROLLBACK TO s;
UPDATE idem_completions SET status = 'completed' WHERE key = 'hand:199';
SELECT idem_complete('hand:199');
ROLLBACK;

-- ... a trigger that swallows the row makes the claim fail, at once
SELECT idem_create_store('many_triggered');
CREATE FUNCTION many_swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER t BEFORE INSERT ON many_triggered FOR EACH ROW EXECUTE FUNCTION many_swallow();
BEGIN;
SELECT count(*) FROM generate_series(1, 5000) AS i, LATERAL (SELECT claimed FROM idem_claim('t:' || i, store => 'many_triggered')) AS c WHERE claimed;
ROLLBACK;
DROP TRIGGER t ON many_triggered;

-- Many keys of two stores, many savepoints, many forgets
DO $$
DECLARE
	n int := 0;
BEGIN
	FOR i IN 1..3000 LOOP
		BEGIN
			IF (SELECT claimed FROM idem_claim('x:' || i, store => CASE i % 2 WHEN 0 THEN 'many_triggered' ELSE 'idem_completions' END::regclass)) THEN
				n := n + 1;
			END IF;
			IF i % 3 = 0 THEN
				RAISE division_by_zero;
			END IF;
		EXCEPTION WHEN division_by_zero THEN
			NULL;
		END;
	END LOOP;
	ASSERT n = 3000;
	FOR i IN 1..3000 LOOP
		CONTINUE WHEN i % 3 = 0;
		PERFORM idem_complete('x:' || i, i, store => CASE i % 2 WHEN 0 THEN 'many_triggered' ELSE 'idem_completions' END::regclass);
	END LOOP;
END $$;
SELECT (SELECT count(*) FROM idem_completions WHERE key LIKE 'x:%' AND status = 'completed'),
	   (SELECT count(*) FROM many_triggered WHERE status = 'completed');
BEGIN;
SELECT count(*) FROM generate_series(1, 3000) AS i WHERE idem_forget('x:' || i);
SELECT count(*) FROM generate_series(1, 3000) AS i WHERE idem_forget('x:' || i, 'many_triggered');
COMMIT;
SELECT count(*) FROM many_triggered WHERE status = 'completed';

SET client_min_messages = error;
DROP TABLE many_effect, many_triggered;
DROP VIEW many_locks;
DROP FUNCTION many_handler, many_swallow;
TRUNCATE idem_completions;
