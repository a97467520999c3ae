# Expiry with replication: a standby expires nothing until it is promoted, a
# subscriber nothing that it still receives, and neither loses a key.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $conf = q{
idem.naptime = 1
log_statement = none
wal_receiver_status_interval = 1
log_line_prefix = '%m [%p] %b '
};

# Two stores: of one the records stay, of the other they go at once.
my $stores = q{
	SELECT idem_create_store('long', '1 hour', 3);
	SELECT idem_create_store('brief', '1 second', 2)};

sub run
{
	my ($node, $sql, $database) = @_;
	return $node->safe_psql($database // 'postgres', $sql);
}

sub await
{
	my ($node, $query, $what) = @_;
	$node->poll_query_until('postgres', $query) or die "never: $what";
	return;
}

# Records with their results, some of which are long, of every generation
sub fill
{
	my ($node, $store, $prefix, $generation) = @_;

	run($node, qq{INSERT INTO $store (key, result, generation)
		SELECT '$prefix' || g, to_json(repeat(g::text, g * 100)), $generation
		FROM generate_series(1, 40) g});
	return;
}

sub records
{
	my ($node, $store) = @_;
	return run($node, "SELECT key, status, completed_at, md5(result::text), "
		  . "lease_until FROM $store ORDER BY key");
}

# What is claimed again though it is there, or replayed otherwise
sub wrong_answers
{
	my ($node, $store) = @_;
	return run($node, "SELECT s.key, c.claimed, c.status FROM $store s, "
		  . "idem_try_claim(s.key, store => '$store') c "
		  . "WHERE s.status = 'completed' AND (c.claimed "
		  . "OR c.result::text IS DISTINCT FROM s.result::text)");
}

# Expiry runs: a record goes.
my $number = 0;

sub expires
{
	my ($node, $store, $what) = @_;
	my $key = 'e' . ++$number;

	run($node, "INSERT INTO $store (key) VALUES ('$key')");
	await($node, "SELECT count(*) = 0 FROM $store WHERE key = '$key'",
		"$what: $store expires");
	pass("$what: $store expires");
	return;
}

# A standby

{
	my $primary = idem_node('primary', preload => 1, conf => $conf,
		init => { allows_streaming => 1 });
	my $standby = PostgreSQL::Test::Cluster->new('standby');
	my $postmaster;
	my $expected;

	run($primary, $stores);
	fill($primary, 'long', "g$_", $_) foreach 0 .. 2;
	run($primary, q{INSERT INTO long (key, status, token, lease_until)
		VALUES ('lease', 'leased', 1, now() + interval '1 hour')});
	expires($primary, 'brief', 'primary');
	$primary->backup('copy');
	$standby->init_from_backup($primary, 'copy', has_streaming => 1);
	$standby->start;

	fill($primary, 'long', 'later', 0);
	expires($primary, 'brief', 'primary, with a standby');
	run($primary, q{INSERT INTO brief (key) VALUES ('last')});
	$primary->wait_for_catchup($standby, 'replay');
	is( run($standby,
			q{SELECT count(*) FROM pg_stat_activity WHERE backend_type ~ 'idem'}),
		'0',
		'standby: nothing of idem runs');
	is(run($standby, 'SELECT DISTINCT worker FROM idem_stores'),
		'none: the server is a standby', 'standby: idem_stores says so');
	is(run($standby, q{SELECT status FROM idem_lookup('g01', 'long')}),
		'completed', 'standby: look-up');
	my ($rc, $out, $err) = $standby->psql('postgres',
		"\\set VERBOSITY verbose\nSELECT idem_claim('g01', store => 'long')");
	like($err, qr/ERROR:  25006:/, 'standby: a claim is refused');
	($rc, $out, $err) = $standby->psql('postgres',
		"\\set VERBOSITY verbose\nCALL idem_expire()");
	like($err, qr/ERROR:  25006:/, 'standby: idem_expire is refused');

	# A reader on the standby in the middle of what expiry does
	my $reader = session($standby);
	$reader->query(q{BEGIN ISOLATION LEVEL REPEATABLE READ;
		SELECT count(*) FROM idem_lookup('g01', 'long')});
	run($primary, q{SELECT idem_set_retention('1 hour', 'long')});
	expires($primary, 'brief', 'primary, with a reader on the standby');
	is($reader->query(q{SELECT count(*) FROM idem_lookup('g01', 'long')}),
		'1', 'standby: a reader goes on');
	$reader->query('COMMIT');

	fill($primary, 'brief', 'end', 0);
	$expected = records($primary, 'long');
	$primary->wait_for_catchup($standby, 'replay');
	$primary->stop('immediate');
	$postmaster = run($standby, 'SELECT pg_postmaster_start_time()');
	$standby->promote;
	await($standby,
		q{SELECT count(*) = 0 FROM brief}, 'promoted: what is due goes');
	pass('promoted: expiry begins');
	is(run($standby, 'SELECT pg_postmaster_start_time()'),
		$postmaster, 'promoted: without a restart');
	is(run($standby, 'SELECT DISTINCT worker FROM idem_stores'),
		'running', 'promoted: idem_stores says so');
	is(records($standby, 'long'), $expected, 'promoted: every key is there');
	is(wrong_answers($standby, 'long'), '', 'promoted: and replays');
	is($reader->query(q{SELECT idem_once('g01', store => 'long'),
			idem_once('fresh', store => 'long')}),
		'f|t', 'promoted: also in a session from before');
	expires($standby, 'brief', 'promoted');
	$reader->quit;
	$standby->stop;
}

# A subscriber of all tables

{
	my $publisher = idem_node('publisher', preload => 1, conf => $conf,
		init => { allows_streaming => 'logical' });
	my $subscriber = idem_node('subscriber', preload => 1, conf => $conf,
		init => { allows_streaming => 'logical' });
	my $connection = $publisher->connstr . ' dbname=postgres';
	my $expected;

	# What the publisher decides differs from what is the default here
	run($publisher, $stores);
	run($publisher, q{SELECT idem_set_retention('77 days')});
	run($subscriber, $stores);
	run($subscriber, q{SELECT idem_create_store('own', '1 second', 2)});
	# the worker has been there, and has noted what it found
	run($subscriber, q{INSERT INTO idem_completions (key) VALUES ('local')});
	await($subscriber,
		q{SELECT filling_since IS NOT NULL
		FROM idem_store_status('idem_completions')},
		'subscriber: the worker was there');
	run($subscriber, q{SELECT idem_forget('local')});

	fill($publisher, 'long', "g$_", $_) foreach 0 .. 2;
	fill($publisher, 'idem_completions', "g$_", $_) foreach 0 .. 3;
	fill($publisher, 'brief', "g$_", $_) foreach 0 .. 1;
	run($publisher, 'CREATE PUBLICATION everything FOR ALL TABLES');
	run($subscriber, "CREATE SUBSCRIPTION s CONNECTION '$connection' "
		  . 'PUBLICATION everything');
	$subscriber->wait_for_subscription_sync($publisher, 's');

	# Everything that happens to a record can be replicated
	run($publisher, q{
		BEGIN; SELECT idem_claim('whole', '1', store => 'long');
		SELECT idem_complete('whole', '{"a": 1.10}', store => 'long'); COMMIT;
		SELECT idem_once('once'), idem_once('gone'), idem_once('old');
		SELECT idem_forget('gone');
		INSERT INTO long (key, status, completed_at)
			VALUES ('redone', 'released', NULL);
		SELECT idem_once('redone', store => 'long');
		INSERT INTO brief (key, status, token, lease_until)
			VALUES ('lease', 'leased', 1, now() + interval '1 hour')});
	run($publisher, q{INSERT INTO long (key, generation) VALUES ('moves', 2);
		UPDATE long SET status = 'released' WHERE key = 'moves';
		SELECT idem_once('moves', store => 'long')});
	expires($publisher, 'brief', 'publisher');
	is(run($publisher, q{SELECT key, status FROM brief}),
		'lease|leased', 'publisher: a lease was carried over');
	$publisher->wait_for_catchup('s');
	foreach my $store ('idem_completions', 'long', 'brief')
	{
		is(records($subscriber, $store),
			records($publisher, $store), "subscriber: the same records: $store");
	}

	# What the publisher no longer sends stays, however old it is
	run($publisher, q{INSERT INTO brief (key) SELECT 'k' || g
		FROM generate_series(1, 20) g});
	$publisher->wait_for_catchup('s');
	$publisher->stop;
	$expected = records($subscriber, 'brief');
	like($expected, qr/k20/, 'subscriber: they came');
	expires($subscriber, 'own', 'subscriber') foreach 1 .. 3;
	is(records($subscriber, 'brief'),
		$expected, 'subscriber: nothing expires that it receives');
	is( run($subscriber,
			q{SELECT retention FROM idem_stores
			WHERE store = 'idem_completions'::regclass}),
		'77 days',
		'subscriber: the longer retention counts');

	# It takes over
	run($subscriber, q{ALTER SUBSCRIPTION s DISABLE});
	run($subscriber, q{ALTER SUBSCRIPTION s SET (slot_name = NONE)});
	run($subscriber, q{DROP SUBSCRIPTION s});
	await($subscriber, q{SELECT array_agg(key) = '{lease}' FROM brief},
		'what is due goes');
	pass('subscriber: takes over: what is due goes, the lease stays');
	$publisher->start;
	foreach my $store ('idem_completions', 'long')
	{
		is(records($subscriber, $store),
			records($publisher, $store), "takes over: every key of $store");
		is(wrong_answers($subscriber, $store), '', "takes over: $store replays");
	}
	is( run($subscriber,
			q{SELECT status FROM idem_try_claim('lease', store => 'brief')}),
		'in_progress',
		'takes over: the lease still runs');
	expires($subscriber, 'brief', 'takes over');
	is( run($subscriber,
			q{SELECT retention FROM idem_stores
			WHERE store = 'idem_completions'::regclass}),
		'77 days',
		'takes over: with the retention of the publisher');
	$publisher->stop;
	$subscriber->stop;
}

done_testing();
