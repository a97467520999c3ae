-- The queue of an act.  A delivery hides its job for a while; a job that has
-- not been acknowledged by then is delivered again: at least once, like any
-- queue.  Each act has a schema of its own.
CREATE TABLE job (
	id			int PRIMARY KEY,
	customer	text NOT NULL,
	amount		int NOT NULL,		-- in cents
	visible_at	timestamptz NOT NULL DEFAULT now(),
	deliveries	int NOT NULL DEFAULT 0,
	acked		boolean NOT NULL DEFAULT false
);
CREATE INDEX ON job (id) WHERE NOT acked;
