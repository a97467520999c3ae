-- idem as CREATE EXTENSION makes it.  :rows records are there already, spread
-- over all four generations, as they are in a store that has run for long:
-- each look-up has to ask every one of them.
SET client_min_messages = warning;
DROP EXTENSION IF EXISTS idem CASCADE;
CREATE EXTENSION idem;
INSERT INTO idem_completions (key, result, generation)
    SELECT 'order:' || i, '{"invoice_no": 17}', i % 4 FROM generate_series(1, :rows) i;

-- The handlers of idem_run.
CREATE OR REPLACE FUNCTION collect(request jsonb) RETURNS json
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO invoice (job, amount) VALUES (request ->> 'job', (request ->> 'amount')::int);
    RETURN '{"invoice_no": 17}'::json;
END $$;
VACUUM (ANALYZE) idem_completions;
