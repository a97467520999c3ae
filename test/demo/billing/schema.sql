-- What the handlers write.  Nothing here would stop a second invoice.
CREATE TABLE invoice (
	no			int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	job			int NOT NULL,
	customer	text NOT NULL,
	amount		int NOT NULL
);
