--
-- Statistics, as far as they do not depend on preload
--
-- idem_stat and its like need shared_preload_libraries, and say so; with it
-- they answer.  What they count is tested in test/t.
SET client_min_messages = warning;
CREATE EXTENSION IF NOT EXISTS idem;
RESET client_min_messages;

CREATE FUNCTION stats_try(query text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	preloaded boolean := (SELECT s.preloaded FROM idem_stat_status() AS s);
	said text;
	hint text;
BEGIN
	EXECUTE 'SELECT count(*) FROM (' || query || ') AS x';
	RETURN CASE WHEN preloaded THEN 'as expected' ELSE 'no error' END;
EXCEPTION WHEN object_not_in_prerequisite_state THEN
	GET STACKED DIAGNOSTICS said = MESSAGE_TEXT, hint = PG_EXCEPTION_HINT;
	RETURN CASE WHEN NOT preloaded AND said LIKE '%shared_preload_libraries'
		AND hint LIKE '%restart the server%' THEN 'as expected' ELSE said END;
END $$;

SELECT query, stats_try(query) FROM unnest(ARRAY[
	'SELECT * FROM idem_stat',
	'SELECT * FROM idem_stat_keys',
	'SELECT * FROM idem_in_flight',
	'SELECT idem_stat_reset()']) AS query;

-- These answer in any case
SELECT count(*) FROM idem_spikes;
SELECT count(*) FROM idem_stat_counters(false) WHERE store = 0;
SELECT count(*) > 0 FROM idem_health;
SELECT count(*) FROM idem_health WHERE topic = 'statistics' AND (SELECT preloaded FROM idem_stat_status()) AND detail NOT LIKE 'idem.track%';
SELECT idem_once('stats:a'), idem_once('stats:a');

-- The columns are part of the interface
SELECT c.relname, string_agg(a.attname, ', ' ORDER BY a.attnum)
FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0
WHERE c.relname IN ('idem_stat', 'idem_stat_keys', 'idem_in_flight', 'idem_spikes', 'idem_health', 'idem_history')
	  AND c.relkind IN ('r', 'v')
GROUP BY 1 ORDER BY 1;

-- A spike stands out from the day before: 60 minutes known, above 20, above
-- 3 times the median, above the median by 10 robust standard deviations
BEGIN;
CREATE FUNCTION stats_minutes(name text, minutes integer, suppressed integer) RETURNS bigint LANGUAGE sql AS $$
	WITH new AS (
		INSERT INTO idem_history
		SELECT '2026-01-01 00:00+00'::timestamptz + n * interval '1 min', 1, name, name, 60, suppressed, 0, suppressed,
			0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
		FROM generate_series(coalesce((SELECT count(*) FROM idem_history WHERE store_name = name), 0),
			coalesce((SELECT count(*) FROM idem_history WHERE store_name = name), 0) + minutes - 1) AS n
		RETURNING 1)
	SELECT count(*) FROM new $$;
SELECT stats_minutes('too new', 59, 1), stats_minutes('too new', 1, 1000);
SELECT stats_minutes('quiet', 60, 1), stats_minutes('quiet', 1, 20), stats_minutes('quiet', 1, 21);
SELECT stats_minutes('busy', 60, 500), stats_minutes('busy', 1, 1500), stats_minutes('busy', 1, 1501);
SELECT stats_minutes('wide', 30, 0), stats_minutes('wide', 30, 100), stats_minutes('wide', 1, 500), stats_minutes('wide', 1, 1600);
SELECT store_name, suppressed, baseline, threshold FROM idem_spikes ORDER BY 1;
ROLLBACK;

-- Only the owner of the extension writes the history
CREATE ROLE regress_idem_stats;
SET ROLE regress_idem_stats;
SELECT count(*) FROM idem_history;
DELETE FROM idem_history;
RESET ROLE;
DROP ROLE regress_idem_stats;
DROP FUNCTION stats_try(text);
