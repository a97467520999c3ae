\set n random(1, 1000000000000000000)
SELECT claimed, result::text
  FROM idem_run('order:' || :n, 'collect', jsonb_build_object('job', 'order:' || :n, 'amount', 4200));
