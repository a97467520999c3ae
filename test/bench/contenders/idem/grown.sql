-- The same in a store that has grown.
\set n random(1, 1000000000000000000)
SELECT idem_once('order:' || :n, store => 'grown');
