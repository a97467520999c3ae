# Whatever stands in the way of a step is left alone by the worker: claims go
# on, other stores are not disturbed, nothing is logged, and once it has gone
# expiry catches up.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

use Idem;

my $node = idem_node('main', preload => 1, init => { allows_streaming => 1 },
	conf => q{
max_connections = 50
autovacuum = off
idem.naptime = 1
log_statement = none
});

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

sql(q{
	CREATE FUNCTION pass(passed text, by interval) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		t timestamptz[];
	BEGIN
		SELECT sealed_at INTO t FROM idem_store_state WHERE store_name = passed;
		FOR i IN coalesce(array_lower(t, 1), 1) .. coalesce(array_upper(t, 1), 0) LOOP
			t[i] := t[i] - by;
		END LOOP;
		UPDATE idem_store_state SET sealed_at = t, filling_since = filling_since - by
		WHERE store_name = passed;
	END $$;
	SELECT idem_create_store('mark', '1 hour', 2);
	SELECT idem_once('one', store => 'mark')});

sub states
{
	my ($store) = @_;
	return sql("SELECT array_to_string(states, ' ') FROM idem_stores "
		  . "WHERE store = '$store'::regclass");
}

sub wait_states
{
	my ($store, $states) = @_;
	return $node->poll_query_until('postgres',
		"SELECT array_to_string(states, ' ') ~ '^$states' FROM idem_stores "
		  . "WHERE store = '$store'::regclass");
}

# Waits until the worker has been through all stores once from here on: the
# store "mark" is somewhere in each of its rounds, and what is erased here it
# notes again.
sub wait_rounds
{
	foreach (1 .. 3)
	{
		sql(q{UPDATE idem_store_state SET filling_since = NULL WHERE store_name = 'mark'});
		claims()
		  until sql(q{SELECT filling_since IS NOT NULL FROM idem_store_state
			WHERE store_name = 'mark'}) eq 't';
	}
	return;
}

# Stores by name, each with a generation 0 that holds old records and is sealed,
# or filling until pass() is called
my @stores;

sub new_stores
{
	my (%state) = @_;
	foreach my $store (sort keys %state)
	{
		push @stores, $store;
		sql("SELECT idem_create_store('$store', '1 hour', 4);
			INSERT INTO $store (key, completed_at, result)
				SELECT 'old' || n, '2000-01-01', (SELECT to_json(string_agg(md5(n::text || m), '')) FROM generate_series(1, 300) AS m)
				FROM generate_series(1, 100) AS n;
			INSERT INTO $store (key, status) VALUES ('lease', 'leased')");
	}
	foreach my $store (sort keys %state)
	{
		$node->poll_query_until('postgres',
			"SELECT filling_since IS NOT NULL FROM idem_store_state WHERE store_name = '$store'")
		  or die 'no worker';
		sql("SELECT pass('$store', '1 day')") if $state{$store} eq 'sealed';
	}
	foreach my $store (sort keys %state)
	{
		next if $state{$store} ne 'sealed';
		wait_states($store, 'sealed filling') or die 'no worker';
	}
	return;
}

# Claims in all stores; none may fail, and each has to be over in no time
my ($claimer, $claims, $worst) = (undef, 0, 0);

sub claims
{
	$claimer //= session($node);
	$claimer->query(q{SET statement_timeout = '20s'; SET synchronous_commit = local});
	foreach my $store (@stores)
	{
		my $start = time;
		my $key = 'claim ' . ++$claims;

		$claimer->query("SELECT idem_once('$key', store => '$store')") eq 't'
		  or die "not claimed: $key";
		$claimer->query("SELECT idem_once('$key', store => '$store')") eq 'f'
		  or die "not replayed: $key";
		$worst = time - $start if time - $start > $worst;
	}
	return;
}

# What stands in the way, all at once: a store, the state that it is in, what
# a session does there; the state that its generation 0 is then left in
my @obstacles = (
	[
		'completion', 'filling',
		q{BEGIN; SELECT idem_claim('k', store => 'completion'); SELECT idem_complete('k', store => 'completion')},
		'full'
	],
	[ 'plain', 'filling', q{BEGIN; INSERT INTO plain (key) VALUES ('k')}, 'full' ],
	[ 'forget', 'filling', q{BEGIN; SELECT idem_forget('lease', 'forget')}, 'full' ],
	[
		'lease', 'filling',
		q{BEGIN; SELECT key FROM lease WHERE key = 'lease' FOR UPDATE}, 'full'
	],
	[
		'vacuum_full_seal', 'filling',
		q{BEGIN; LOCK TABLE vacuum_full_seal_0 IN SHARE UPDATE EXCLUSIVE MODE}, 'full'
	],
	[
		'cursor', 'sealed',
		q{BEGIN; DECLARE c CURSOR FOR SELECT * FROM cursor; FETCH c}, 'sealed'
	],
	[
		'dump', 'sealed',
		q{BEGIN ISOLATION LEVEL REPEATABLE READ; LOCK TABLE dump IN ACCESS SHARE MODE}, 'sealed'
	],
	[
		'wraparound', 'sealed',
		q{BEGIN; LOCK TABLE wraparound_0 IN SHARE UPDATE EXCLUSIVE MODE}, 'sealed'
	],
	[ 'grants', 'sealed', q{BEGIN; GRANT SELECT ON grants_0 TO pg_monitor}, 'sealed' ],
	[ 'indexed', 'sealed', q{BEGIN; CREATE INDEX ON indexed_0 (attempts)}, 'sealed' ],
	[
		'toast', 'sealed',
		q{SET vacuum_cost_delay = 100; SET vacuum_cost_limit = 1; VACUUM TOAST}, 'sealed'
	],
	# no obstacles
	[
		'claim', 'sealed',
		q{BEGIN; SELECT idem_claim('k', store => 'claim')}, 'empty'
	],
	[
		'replay', 'sealed',
		q{BEGIN; SELECT idem_claim('old1', store => 'replay')}, 'empty'
	],
	[
		'young', 'sealed',
		q{BEGIN; SELECT idem_once('k', store => 'young')}, 'empty'
	],
	[ 'free', 'sealed', 'SELECT 1', 'empty' ],);

my %session;
new_stores(map { $_->[0] => $_->[1] } @obstacles);
foreach my $obstacle (@obstacles)
{
	my ($store, $state, $command) = @$obstacle;
	my $toast = sql("SELECT reltoastrelid::regclass FROM pg_class WHERE relname = '${store}_0'");
	my $one = $session{$store} = session($node);

	$command =~ s/TOAST/$toast/;
	if ($store eq 'toast')
	{
		$one->send($command);
		$node->poll_query_until('postgres',
			"SELECT count(*) > 0 FROM pg_locks WHERE relation = '$toast'::regclass "
			  . "AND mode = 'ShareUpdateExclusiveLock' AND granted")
		  or die 'no VACUUM';
	}
	else
	{
		$one->query($command);
	}
}
sql("SELECT pass('$_->[0]', '1 day')") foreach @obstacles;
wait_rounds();

foreach my $obstacle (@obstacles)
{
	my ($store, $state, $command, $left) = @$obstacle;

	is((split / /, states($store))[0], $left, "$store: $left while it is there");
	is( sql("SELECT idem_once('old1', store => '$store'), "
			  . "(SELECT count(*) FROM $store WHERE key LIKE 'old_%')"),
		$left eq 'empty' ? 't|0' : 'f|100',
		"$store: nothing is half gone");
}
is(sql(q{SELECT string_agg(store::text || trouble, ',') FROM idem_stores}),
	'', 'an obstacle is no trouble');

sql("SELECT pg_cancel_backend(${\ $session{toast}->pid})");
like($session{toast}->answer_error, qr/57014/, 'VACUUM was still there');
foreach my $obstacle (@obstacles)
{
	my $store = $obstacle->[0];

	$session{$store}->query('ROLLBACK') if $obstacle->[2] =~ /BEGIN/;
}
foreach my $obstacle (@obstacles)
{
	my ($store, $state, $command, $left) = @$obstacle;

	ok( $node->poll_query_until('postgres',
			"SELECT states[1] <> 'full' FROM idem_stores WHERE store = '$store'::regclass"),
		"$store: sealed afterwards")
	  if $left eq 'full';
	sql("UPDATE $store SET completed_at = completed_at - interval '1 day'; "
		  . "SELECT pass('$store', '1 day')");
	ok( $node->poll_query_until('postgres',
			"SELECT NOT EXISTS (SELECT FROM $store WHERE key LIKE 'old__')"),
		"$store: emptied afterwards");
	is( sql("SELECT status FROM idem_try_claim('lease', store => '$store')"),
		'uncertain', "$store: its lease is there");
}
claims();

# A synchronous standby that is down: commits wait for it, expiry does not

new_stores(sync_full => 'filling', sync_sealed => 'sealed');
$node->append_conf('postgresql.conf', "synchronous_standby_names = 'nobody'");
$node->reload;
my $waiting = session($node);
$node->poll_query_until('postgres', q{SELECT current_setting('synchronous_standby_names') = 'nobody'});
$waiting->query('SET synchronous_commit = on');
$waiting->send(q{INSERT INTO sync_full (key) VALUES ('not acknowledged')});
$node->poll_query_until('postgres',
	"SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = ${\ $waiting->pid}")
  or die 'no synchronous replication';
sql(q{SET synchronous_commit = local; SELECT pass('sync_full', '1 day'), pass('sync_sealed', '1 day')});
ok(wait_states('sync_sealed', 'empty'), 'standby down: emptied');
sql(q{SET synchronous_commit = local; UPDATE idem_store_state SET filling_since = NULL WHERE store_name = 'mark'});
claims();
is((split / /, states('sync_full'))[0], 'full',
	'standby down: a commit that waits for it holds its generation');
my $by_hand = session($node);
$by_hand->query(q{SET synchronous_commit = on; CALL idem_expire('sync_sealed')});
$node->append_conf('postgresql.conf', "synchronous_standby_names = ''");
$node->reload;
$waiting->answer;
ok(wait_states('sync_full', 'sealed'), 'standby not needed any more: sealed');

is(sql(q{SELECT string_agg(store::text || trouble, ',') FROM idem_stores}),
	'', 'no trouble');
unlike(PostgreSQL::Test::Utils::slurp_file($node->logfile),
	qr/WARNING|cannot go on/, 'nothing in the log');
cmp_ok($worst, '<', 20, 'no claim was held up');
note(sprintf '%d times a claim and its replay, at most %.3f s', $claims, $worst);

$node->stop;
done_testing();
