-- (f) As (b), in a partition a day, and the oldest is dropped.  Keys are kept
-- for :days days, a day lasts :day seconds, and :rows records are spread over
-- the days before :start.  A unique index of a partitioned table has to contain
-- the day, so each claim has to look into all other days as well.  (Two
-- attempts at midnight, on both sides of it, still both run.)
SET client_min_messages = warning;
DROP TABLE IF EXISTS key_f;
CREATE TABLE key_f (
    key text COLLATE "C",
    day bigint NOT NULL,
    result json,
    created_at timestamptz NOT NULL DEFAULT now(),
    completed_at timestamptz,
    PRIMARY KEY (key, day)
) PARTITION BY LIST (day);

CREATE OR REPLACE FUNCTION day_f(day float8, at timestamptz) RETURNS bigint
RETURN floor(extract(epoch FROM at) / day)::bigint;

-- The job: makes tomorrow's partition, and drops what is too old.
CREATE OR REPLACE PROCEDURE expire_f(day float8, days int, at timestamptz)
LANGUAGE plpgsql AS $$
DECLARE
    today bigint := day_f(day, at);
    old regclass;
BEGIN
    FOR d IN today - days .. today + 2 LOOP
        CONTINUE WHEN to_regclass('key_f_' || d) IS NOT NULL;
        EXECUTE format('CREATE TABLE key_f_%s PARTITION OF key_f FOR VALUES IN (%s)', d, d);
    END LOOP;
    FOR old IN SELECT inhrelid FROM pg_inherits
                WHERE inhparent = 'key_f'::regclass
                  AND substr(inhrelid::regclass::text, 7)::bigint < today - days
    LOOP
        EXECUTE format('DROP TABLE %s', old);
    END LOOP;
END $$;
CALL expire_f(:day, :days, to_timestamp(:start));
INSERT INTO key_f (key, day, result, completed_at)
    SELECT 'order:' || (1e18 * random())::bigint,
           day_f(:day, to_timestamp(:start - :day * :days * (i - 1)::float8 / :rows)),
           '{"invoice_no": 17}', now()
      FROM generate_series(1, :rows) i;
VACUUM (ANALYZE) key_f;
