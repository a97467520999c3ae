\set n random(1, 1000000000000000000)
INSERT INTO key_a_grown (key) VALUES ('order:' || :n) ON CONFLICT DO NOTHING;
