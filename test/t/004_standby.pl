# A standby answers look-ups and refuses claims; promoted, it knows every key
# that it had received, and claims.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $primary = idem_node('primary', init => { allows_streaming => 1 },
	conf => "max_prepared_transactions = 10\nautovacuum = off\n");
my $standby = PostgreSQL::Test::Cluster->new('standby');
my $parallel = $primary->pg_version >= 16 ? 'debug_parallel_query' :
  'force_parallel_mode';

$primary->safe_psql(
	'postgres', q{
	CREATE TABLE effect (key text);
	CREATE FUNCTION f(j jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT j';
	SELECT idem_create_store('other');
	SELECT idem_once('before');
	SELECT idem_once('before', store => 'other')});
$primary->backup('copy');
$standby->init_from_backup($primary, 'copy', has_streaming => 1);
$standby->start;

sub catch_up
{
	$primary->wait_for_catchup($standby, 'replay');
	return;
}

sub on_primary { return $primary->safe_psql('postgres', $_[0]); }
sub on_standby { return $standby->safe_psql('postgres', $_[0]); }

# Look-ups

on_primary(q{BEGIN; SELECT claimed FROM idem_claim('k', '{"a":1}');
	INSERT INTO effect VALUES ('k');
	SELECT idem_complete('k', '{"b":1.10,"a":1e2,"a":2}'); COMMIT;
	BEGIN; SELECT claimed FROM idem_claim('big');
	SELECT idem_complete('big', to_json(repeat('x', 1000000))); COMMIT});
catch_up();
is( on_standby(q{SELECT status, result, fingerprint = idem_fingerprint('{"a":1}')
		FROM idem_lookup('k')}),
	'completed|{"b":1.10,"a":1e2,"a":2}|t', 'look-up on the standby');
is(on_standby(q{SELECT length(result::text) FROM idem_lookup('big')}),
	'1000002', 'look-up of a toasted result');
is(on_standby(q{SELECT count(*) FROM idem_lookup('nobody')}),
	'0', 'look-up of an unknown key');
is(on_standby(q{SELECT status FROM idem_lookup('before', 'other')}),
	'completed', 'look-up in another store');
is(on_standby("SET $parallel = on; SELECT status FROM idem_lookup('k')"),
	'completed', 'look-up in a parallel plan');

# What is in flight on the primary is not there
my $open = session($primary);
$open->query(q{BEGIN; SELECT idem_once('open')});
on_primary(q{SELECT pg_switch_wal()});
catch_up();
is(on_standby(q{SELECT count(*) FROM idem_lookup('open')}),
	'0', 'look-up of a key in flight');

# Claims of whatever kind, keys that are there and keys that are not
foreach my $key ('k', 'nobody', 'open')
{
	foreach my $call (
		"idem_claim('$key')",
		"idem_claim('$key', wait => '0')",
		"idem_try_claim('$key')",
		"idem_claim_batch(ARRAY['$key'])",
		"idem_complete('$key', '1')",
		"idem_complete('$key', 1)",
		"idem_release('$key')",
		"idem_once('$key')",
		"idem_run('$key', 'f', '1')",
		"idem_forget('$key')")
	{
		my ($rc, $out, $err) =
		  $standby->psql('postgres', "\\set VERBOSITY verbose\nSELECT $call");
		like($err, qr/ERROR:  25006:/, "standby refuses $call");
	}
}
foreach my $call ("idem_create_store('new')", "idem_set_retention('1 day')")
{
	my ($rc, $out, $err) =
	  $standby->psql('postgres', "\\set VERBOSITY verbose\nSELECT $call");
	like($err, qr/ERROR:  25006:/, "standby refuses $call");
}

# A bad key is an error of its own kind there too
{
	my ($rc, $out, $err) = $standby->psql('postgres',
		"\\set VERBOSITY verbose\nSELECT idem_lookup('')");
	like($err, qr/ERROR:  22023:/, 'standby refuses a bad key');
}

# A forgotten key, a store that came later, a key that was prepared
on_primary(q{SELECT idem_forget('before'); SELECT idem_create_store('later');
	SELECT idem_once('l', store => 'later');
	BEGIN; SELECT idem_once('prepared'); PREPARE TRANSACTION 'p';
	BEGIN; SELECT idem_once('prepared too'); PREPARE TRANSACTION 'q'});
catch_up();
my $reader = session($standby);
is($reader->query(q{SELECT count(*) FROM idem_lookup('before')}),
	'0', 'forgotten on the standby');
is($reader->query(q{SELECT count(*) FROM idem_lookup('l', 'later')}),
	'1', 'a new store on the standby');
is($reader->query(q{SELECT count(*) FROM idem_lookup('prepared')}),
	'0', 'prepared, not there');
on_primary(q{COMMIT PREPARED 'p'});

# A session that has looked keys up before sees what the structure becomes
is($reader->query(q{SELECT count(*) FROM idem_lookup('l', 'other')}),
	'0', 'not in that store');
on_primary(q{ALTER TABLE other_1 ADD CHECK (attempts < 100);
	CREATE INDEX ON other (claimed_at); VACUUM FULL other;
	SELECT idem_once('l', store => 'other');
	DROP TABLE later});
catch_up();
is($reader->query(q{SELECT count(*) FROM idem_lookup('l', 'other')}),
	'1', 'in a store that was rebuilt');
like($reader->error(q{SELECT count(*) FROM idem_lookup('l', 'later')}),
	qr/ERROR:  42P01:/, 'not in a store that was dropped');

# Failover: the primary is gone with what it had in flight
catch_up();
$primary->stop('immediate');
$open->kill9;
$standby->promote;

is( on_standby(q{SELECT claimed, status, result FROM idem_claim('k', '{"a":1.0}')}),
	'f|completed|{"b":1.10,"a":1e2,"a":2}', 'promoted: replay');
is($reader->query(q{SELECT idem_once('k'), idem_once('l', store => 'other')}),
	'f|f', 'promoted: replay in a session that was there before');
is(on_standby(q{SELECT idem_once('prepared')}), 'f', 'promoted: prepared');
is(on_standby(q{SELECT status FROM idem_try_claim('prepared too')}),
	'in_progress', 'promoted: still prepared');
$reader->send(q{SELECT idem_once('prepared too')});
$reader->wait_blocked;
on_standby(q{ROLLBACK PREPARED 'q'});
is($reader->answer, 't', 'promoted: a waiter claims what was prepared');
is(on_standby(q{SELECT idem_once('open'), idem_once('before')}),
	't|t', 'promoted: what was in flight or forgotten is free');
is(on_standby(q{SELECT idem_once('open'), idem_once('before')}),
	'f|f', 'promoted: once');
is($reader->query(q{SELECT idem_once('more')}), 't', 'promoted: the session goes on');

$standby->stop;
done_testing();
