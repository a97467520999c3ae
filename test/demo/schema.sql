-- What an act plays on.  Each act has a schema of its own with these tables.

-- The queue.  A delivery hides its job for a while; a job that has not been
-- acknowledged by then is delivered again: at least once, like any queue.
CREATE TABLE job (
	id			int PRIMARY KEY,
	customer	text NOT NULL,
	amount		int NOT NULL,		-- in cents
	visible_at	timestamptz NOT NULL DEFAULT now(),
	deliveries	int NOT NULL DEFAULT 0,
	acked		boolean NOT NULL DEFAULT false
);
CREATE INDEX ON job (id) WHERE NOT acked;

-- What the handlers write.  Nothing here would stop a second invoice.
CREATE TABLE invoice (
	no			int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	job			int NOT NULL,
	customer	text NOT NULL,
	amount		int NOT NULL
);
