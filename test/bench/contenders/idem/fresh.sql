-- A claim and its record alone, in the default store.
\set n random(1, 1000000000000000000)
SELECT idem_once('order:' || :n);
