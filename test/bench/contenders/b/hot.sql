-- All clients come with the same key.
SELECT true AS completed, result::text FROM key_b WHERE key = 'order:1';
