# Counters folded by the minute, spikes in them, what is logged, and
# idem_health: each row appears for its cause and goes with it.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $node = idem_node('main', preload => 1, conf => q{
idem.naptime = 1
max_prepared_transactions = 10
autovacuum = off
});

sub sql { return $node->safe_psql('postgres', $_[0]); }

sub health
{
	my ($topic, $expected, $what) = @_;
	is(sql("SELECT count(*) FROM idem_health WHERE topic = '$topic'"), $expected, $what);
	return;
}

sql(q{SELECT idem_create_store(s) FROM unnest('{quiet,busy,first,running,calm}'::text[]) s;
	CREATE FUNCTION origin() RETURNS text LANGUAGE sql STABLE AS $$
		SELECT system_identifier || '/' || oid FROM pg_control_system(), pg_database
		WHERE datname = current_database() $$;
	CREATE PROCEDURE note(s regclass, at timestamptz, n bigint, secs float8 DEFAULT 60) LANGUAGE sql AS $$
		INSERT INTO idem_history VALUES (at, s, s::text, origin(), secs, n, 0, n,
			0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) $$});

# Spikes.  A day of minutes, at a fixed time; noise by a fixed rule
my $t = "timestamptz '2026-01-02 00:00+00'";
sql(qq{DO \$\$ BEGIN
	FOR m IN 0 .. 1439 LOOP
		CALL note('busy', $t + m * interval '1 min', 1000 + (m * 7919) % 100 - 50);
		IF m % 30 = 0 THEN CALL note('quiet', $t + m * interval '1 min', 1 + m % 3); END IF;
		CALL note('calm', $t + m * interval '1 min', 10 + (m * 7919) % 9);
	END LOOP;
	-- the first traffic ever, however much; and a minute of an hour's worth
	FOR m IN 0 .. 59 LOOP CALL note('first', $t + m * interval '1 min', 100 * m); END LOOP;
	CALL note('quiet', $t + interval '1440 min', 20);
	CALL note('quiet', $t + interval '1441 min', 21);
	CALL note('quiet', $t + interval '1442 min', 600, 3600);
	CALL note('quiet', $t + interval '1503 min', 600);
	CALL note('busy', $t + interval '1440 min', 2900);
	CALL note('busy', $t + interval '1441 min', 3100);
	CALL note('busy', $t + interval '1442 min', 3100);
	CALL note('calm', $t + interval '1440 min', 40);
END \$\$});
is( sql(qq{SELECT store_name, (extract(epoch FROM minute - $t) / 60)::int, suppressed, baseline, threshold
		FROM idem_spikes ORDER BY 1, 2}), "busy|1441|3100.0|999.5|2998.5
busy|1442|3100.0|1000.0|3000.0
quiet|1441|21.0|0.0|20.0
quiet|1503|600.0|0.0|20.0", 'spikes, and nothing but them');
sql(q{DELETE FROM idem_history});

# The worker folds a minute once it is over.  "quiet" has a baseline, so what
# it counts now is a spike; "running" has been one for three minutes.
sql(q{DO $$ DECLARE
	t timestamptz := date_trunc('minute', clock_timestamp());
	BEGIN
	FOR m IN 4 .. 120 LOOP
		CALL note('quiet', t - m * interval '1 min', m % 2);
		CALL note('running', t - m * interval '1 min', m % 2);
	END LOOP;
	FOR m IN 1 .. 3 LOOP CALL note('running', t - m * interval '1 min', 300); END LOOP;
	CALL note('busy', now() - interval '31 days', 1);
END $$});
my $from = -s $node->logfile;
my $began = sql(q{SELECT date_trunc('minute', clock_timestamp())});
foreach my $store ('quiet', 'running', 'first')
{
	sql(qq{SELECT idem_once('k', store => '$store') FROM generate_series(1, 500);
		SELECT idem_once('k', store => '$store') FROM generate_series(1, 500)});
}
sql(q{BEGIN; SELECT idem_claim('r', store => 'first'); ROLLBACK});
my $recent = "minute >= '$began'";
$node->poll_query_until('postgres', qq{SELECT count(*) = 3 AND sum(claims) = 3001 FROM
	(SELECT store, sum(claims) AS claims FROM idem_history
	WHERE $recent AND executed + rolled_back + suppressed = claims
	GROUP BY store) x})
  or die 'not folded';
is( sql(qq{SELECT store_name, sum(claims), sum(executed), sum(suppressed), sum(rolled_back),
		bool_and(seconds BETWEEN 0 AND 75), bool_and(origin = origin()),
		bool_and(minute = date_trunc('minute', minute))
		FROM idem_history WHERE $recent GROUP BY 1 ORDER BY 1}),
	"public.first|1001|1|999|1|t|t|t\npublic.quiet|1000|1|999|0|t|t|t\npublic.running|1000|1|999|0|t|t|t",
	'folded by the minute');
is(sql(q{SELECT count(*) FROM idem_history WHERE minute < now() - interval '30 days'}), '0',
	'what is older than 30 days is gone');
is( sql(q{SELECT string_agg(DISTINCT store::regclass::text, ',') FROM idem_spikes
		WHERE minute > now() - interval '10 minutes'}),
	'quiet,running', 'spikes of now');
health('spike', 2, 'idem_health shows the spikes');
$node->wait_for_log(qr/spike of suppressed duplicates in store public\.quiet/, $from);
sql(q{SELECT pg_sleep(2.5)});    # at least one more round of the worker
my $log = slurp_file($node->logfile, $from);
is(scalar(() = $log =~ /spike of suppressed duplicates in store public\.quiet/g), 1, 'logged once');
unlike($log, qr/spike of suppressed duplicates in store public\.(running|first)/,
	'an episode that was there before is not logged again, and neither is first traffic');
is(sql(qq{SELECT sum(claims) FROM idem_history WHERE store = 'quiet'::regclass AND $recent}), '1000',
	'nothing is folded twice');
sql(q{DELETE FROM idem_history});
health('spike', 0, 'and no more');

# A restart folds nothing a second time
$node->restart;
$node->poll_query_until('postgres', q{SELECT idem_worker_status() = 'running'});
sql(q{SELECT pg_sleep(2.5)});
is(sql(q{SELECT count(*) FROM idem_history WHERE store = 'quiet'::regclass}), '0',
	'nothing is folded again after a restart');

# FOR ALL TABLES publications do not stand in the way
sql(q{CREATE PUBLICATION everything FOR ALL TABLES});
is(sql(q{CALL note('busy', now() - interval '40 days', 1);
	UPDATE idem_history SET claims = 2; DELETE FROM idem_history; SELECT count(*) FROM idem_history}),
	'0', 'rows can be changed under a publication of all tables');

# idem_health
is(sql(q{SELECT severity, topic FROM idem_health}), 'ok|all', 'all is well');

$node->append_conf('postgresql.conf', "idem.worker = off\n");
$node->reload;
$node->poll_query_until('postgres', q{SELECT count(*) > 0 FROM idem_health WHERE topic = 'expiry'})
  or die 'the worker is on';
is( sql(q{SELECT severity, detail FROM idem_health WHERE topic = 'expiry'}),
	'warning|no worker: idem.worker is off', 'no worker');
sql(q{INSERT INTO calm (key, completed_at) VALUES ('old', now() - interval '90 days');
	UPDATE idem_store_state SET filling_since = now() - interval '60 days' WHERE store = 'calm'::regclass});
is( sql(q{SELECT count(*) FROM idem_health WHERE topic = 'expiry' AND store = 'calm'::regclass
		AND detail LIKE 'expiry is overdue by %'}), '1', 'expiry overdue');
sql(q{UPDATE idem_store_state SET filling_since = now(), trouble = 'the disk is on fire'
	WHERE store = 'calm'::regclass});
is(sql(q{SELECT detail FROM idem_health WHERE topic = 'expiry' AND store = 'calm'::regclass}),
	'expiry cannot go on: the disk is on fire', 'trouble');
sql(q{UPDATE idem_store_state SET trouble = NULL});
$node->append_conf('postgresql.conf', "idem.worker = on\n");
$node->reload;
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM idem_health WHERE topic = 'expiry'})
  or die 'expiry is still in trouble';

sql(q{SELECT idem_lease('l' || g, lease => '1 ms', store => 'calm') FROM generate_series(1, 3) g});
is(sql(q{SELECT severity, topic, detail LIKE '3 leases have run out, the oldest % ago'
		FROM idem_health}), 'critical|uncertain|t', 'uncertain leases');
sql(q{SELECT idem_resolve('l' || g, false, store => 'calm') FROM generate_series(1, 3) g});
health('uncertain', 0, 'decided');

my $holder = session($node);
my $waiter = session($node);
$holder->query(q{BEGIN; SELECT idem_claim('w', store => 'calm')});
$waiter->send(q{SET idem.wait_timeout = '5 min'; SELECT idem_once('w', store => 'calm')});
$node->poll_query_until('postgres', q{SELECT count(*) = 2 FROM idem_health
	WHERE topic IN ('waiting', 'idle holder')}) or die 'no waiter, or no idle holder';
my ($h, $w) = ($holder->pid, $waiter->pid);
like(sql(q{SELECT detail FROM idem_health WHERE topic = 'waiting'}),
	qr/^session $w has waited 00:\d\d:\d\d for key w, blocked by $h$/, 'the longest waiter');
like(sql(q{SELECT detail FROM idem_health WHERE topic = 'idle holder'}),
	qr/^session $h holds w and is idle in transaction since /, 'a holder that is idle');
$holder->query('SELECT idem_complete(\'w\', store => \'calm\'); PREPARE TRANSACTION \'p\'');
like(sql(q{SELECT detail FROM idem_health WHERE topic = 'waiting'}),
	qr/blocked by a prepared transaction$/, 'behind a prepared transaction');
sql(q{ROLLBACK PREPARED 'p'});
$waiter->answer;
health('waiting', 0, 'no waiter');
health('idle holder', 0, 'no holder');

sql(q{SELECT idem_once(gen_random_uuid()::text, store => 'calm') FROM generate_series(1, 2000)
});
is(sql(q{SELECT topic, store FROM idem_health}), 'random keys|calm', 'random keys');
sql(q{SELECT idem_once('a', store => 'calm') FROM generate_series(1, 2); SELECT idem_once('a', store => 'calm')});
health('random keys', 0, 'something was suppressed');
sql(q{SELECT idem_once('order:' || gen_random_uuid(), store => 'busy') FROM generate_series(1, 2000)});
health('random keys', 0, 'a random part of a key is no sign');
sql(q{SELECT idem_once('mail:jane.doe@Example.com:' || g, store => 'busy') FROM generate_series(1, 100) g});
is(sql(q{SELECT topic, store FROM idem_health}), 'personal data|busy', 'e-mail addresses');
sql(q{SELECT idem_stat_reset('busy')});
is(sql(q{SELECT severity FROM idem_health}), 'ok', 'all is well again');
is(sql(q{SET idem.track = off; SELECT topic FROM idem_health}), 'statistics', 'idem.track is off');
is(sql(q{SELECT count(*) FROM idem_health WHERE advice NOT LIKE '%.'}), '0', 'advice is given');

$node->stop;
done_testing();
