-- What a round of the torture run works on; it is made in a schema of its own.

-- What the operations do.  There is no unique index: only idem keeps a second
-- run away.
CREATE TABLE effect (
	op			text NOT NULL,
	attempt		text NOT NULL,
	digest		text NOT NULL		-- of the result stored with it
);
CREATE INDEX ON effect USING hash (op);

-- Long outlives the round, and turns its generations; short does not.
SELECT idem_create_store('long', '10 min', 16);
SELECT idem_create_store('short', '6 s', 4);

-- For idem_run: what makes this attempt different comes by the session's
-- settings, since the request has to be the same in every attempt.
CREATE FUNCTION handler(request jsonb) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
	result text := current_setting('torture.result');
BEGIN
	INSERT INTO effect
	VALUES (request ->> 'op', current_setting('torture.attempt'), md5(result));
	RETURN result::json;
END $$;
