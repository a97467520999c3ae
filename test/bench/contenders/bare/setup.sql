-- The work that all do: one row in an ordinary table.  Without a key it is the
-- floor: nothing that makes it run once can be faster.
SET client_min_messages = warning;
DROP TABLE IF EXISTS invoice CASCADE;
CREATE TABLE invoice (
    no bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job text NOT NULL,
    amount int NOT NULL
);
