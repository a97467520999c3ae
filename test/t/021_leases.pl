# Leases: what a holder acts on survives whatever happens to the server, no
# token is ever given twice, and one clock, wherever it is set, decides.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes 'usleep';

use Idem;

# Nothing but a commit may flush WAL here.
my $node = idem_node('main', init => { allows_streaming => 1 }, conf => q{
restart_after_crash = on
log_statement = none
autovacuum = off
bgwriter_lru_maxpages = 0
checkpoint_timeout = 1h
wal_writer_delay = 10s
max_prepared_transactions = 10
});
my $highest = 0;

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# The SQLSTATE with which a command fails, or what it answers
sub outcome
{
	my ($sql, $server) = @_;
	my ($rc, $out, $err) = ($server // $node)
	  ->psql('postgres', "\\set VERBOSITY sqlstate\n$sql");
	return $err =~ /ERROR:  (\S+)/ ? $1 : $out;
}

# A new token, which must be higher than all that were given before
sub is_new
{
	my ($token, $name) = @_;
	cmp_ok($token, '>', $highest, "$name: the token is new");
	$highest = $token if $token > $highest;
	return;
}

sub wal_writer
{
	return sql(q{SELECT pid FROM pg_stat_activity
		WHERE backend_type = 'walwriter'});
}

sub crash
{
	my ($pid) = @_;

	kill('KILL', $pid) or die "cannot kill $pid: $!";
	$node->poll_query_until('postgres',
		"SELECT pid <> $pid FROM pg_stat_activity "
		  . "WHERE backend_type = 'walwriter'")
	  or die 'the server did not come back';
	return;
}

# Durability: whatever the session has set, a crash right after the commit of
# a lease, of its extension or its checkpoint takes nothing of it away

sql(q{CREATE TABLE effect (key text);
	CREATE FUNCTION lazy(k text) RETURNS bigint LANGUAGE plpgsql
		SET synchronous_commit = off AS $$
		BEGIN RETURN (idem_lease(k)).token; END $$;
	SELECT idem_lease(k) FROM unnest('{held,again}'::text[]) k;
	UPDATE idem_completions SET lease_until = '2000-01-01' WHERE key = 'again'});

my $held = sql(q{SELECT token FROM idem_lookup('held')});
my $take = q{SELECT token FROM idem_lease('KEY')};
my @durable = (
	[ 'off', "SET synchronous_commit = off; $take" ],
	[ 'local', "SET synchronous_commit = local; $take" ],
	[
		'set local before',
		"BEGIN; SET LOCAL synchronous_commit = off; $take; COMMIT"
	],
	[
		'set local after',
		"BEGIN; $take; SET LOCAL synchronous_commit = off; COMMIT"
	],
	[
		'subtransaction',
		"SET synchronous_commit = off; BEGIN; SAVEPOINT a; SAVEPOINT b; "
		  . "$take; RELEASE a; COMMIT"
	],
	[ 'function', "SET synchronous_commit = off; SELECT lazy('KEY')" ],
	[
		'again',
		q{SET synchronous_commit = off;
		SELECT token FROM idem_lease('KEY', on_uncertain => 'retry')}
	],
	[
		'extend',
		qq{SET synchronous_commit = off;
		SELECT $held FROM idem_extend('held', $held, '30 days')}
	],
	[
		'checkpoint',
		qq{SET synchronous_commit = off;
		SELECT $held FROM idem_checkpoint('held', $held, '"paid"')}
	],);

my $stopped;

# What a session that does not wait for the disk has done is lost, as a rule:
# otherwise the rest would prove nothing
{
	my $lazy = session($node);
	$stopped = wal_writer();
	kill('STOP', $stopped) or die "cannot stop $stopped: $!";
	$lazy->query(q{SET synchronous_commit = off; INSERT INTO effect VALUES ('lost')});
	crash($stopped);
	is(sql(q{SELECT count(*) FROM effect}), '0', 'a lazy commit is lost');
	$lazy->kill9;
}

foreach my $case (@durable)
{
	my ($name, $commands) = @$case;
	my $lazy = session($node);
	my $key = $name =~ /extend|checkpoint/ ? 'held' : $name;
	my $token;

	$stopped = wal_writer();
	kill('STOP', $stopped) or die "cannot stop $stopped: $!";
	$token = $lazy->query($commands =~ s/KEY/$key/r);
	is($lazy->query('SHOW synchronous_commit'),
		$commands =~ /SET synchronous_commit = (\w+)/ ? $1 : 'on',
		"$name: the setting is as before");
	$lazy->query(q{SET synchronous_commit = off; INSERT INTO effect VALUES ('lost')});
	crash($stopped);
	is(sql(qq{SELECT status, token FROM idem_lookup('$key')}),
		"leased|$token", "$name: the lease is there after a crash");
	is(sql(q{SELECT count(*) FROM effect}), '0', "$name: what came later is not");
	is_new($token, $name) if $key ne 'held';
	$lazy->kill9;
}
is( sql(q{SELECT lease_until > now() + interval '29 days', checkpoint
		FROM idem_lookup('held')}),
	't|"paid"', 'extension and checkpoint are there after a crash');
is(sql(qq{SELECT idem_complete('off', '1', token) FROM idem_lookup('off')}),
	'1', 'the lease that survived is completed');

# Tokens: an immediate shutdown after a good many of them, and after some in
# transactions that never ended
{
	my $open = session($node);

	is_new(
		sql(q{SELECT max(l.token) FROM generate_series(1, 100) i,
			idem_lease('token:' || i) l}), 'a hundred');
	$open->query(q{BEGIN; SELECT idem_lease('open:' || i)
		FROM generate_series(1, 100) i});
	$node->stop('immediate');
	$open->kill9;
	$node->start;
	is_new(sql(q{SELECT token FROM idem_lease('after')}), 'immediate shutdown');
	is(sql(q{SELECT count(DISTINCT token) = count(*) FROM idem_completions}),
		't', 'no token was given twice');
	is(sql(q{SELECT count(*) FROM idem_completions WHERE key LIKE 'open:%'}),
		'0', 'what was not committed left nothing');
}

# Prepared transactions
{
	my $taker = session($node);
	my $waiter = session($node);

	sql(q{BEGIN; SELECT idem_lease('prepared'); PREPARE TRANSACTION 'p';
		BEGIN; SELECT idem_lease('given up'); PREPARE TRANSACTION 'q'});
	is(outcome(q{SELECT status FROM idem_try_lease('prepared')}),
		'in_progress', 'prepared: in progress');
	is(outcome(q{SET idem.wait_timeout = 0; SELECT idem_claim('prepared')}),
		'ID002', 'prepared: a claim does not get it');
	$node->stop('immediate');
	$_->kill9 foreach $taker, $waiter;
	$node->start;
	$taker = session($node);
	$waiter = session($node);
	$taker->send(q{SELECT claimed, status FROM idem_lease('prepared')});
	$taker->wait_blocked;
	$waiter->send(q{SELECT claimed, status FROM idem_lease('given up')});
	$waiter->wait_blocked;
	sql(q{COMMIT PREPARED 'p'});
	like($taker->answer_error, qr/ID002/, 'prepared: the lease runs now');
	sql(q{ROLLBACK PREPARED 'q'});
	is($waiter->answer, 't|leased', 'prepared: rolled back, free');
	is( sql(q{BEGIN; SELECT idem_complete('prepared', '1', token)
			FROM idem_lookup('prepared'); PREPARE TRANSACTION 'p'; COMMIT PREPARED 'p'}),
		'1', 'prepared: completed by others, prepared again');
	is(sql(q{SELECT status FROM idem_claim('prepared')}),
		'completed', 'prepared: done');
	$_->quit foreach $taker, $waiter;
}

# Names: of 63 bytes, with whatever bytes can be in them
{
	my $quoted = q{r"o\\l'e } . "\n\t{}%" . "\xc3\xa9" x 25;
	my $role = $quoted =~ s/"/""/gr;
	my $name = q{E'a"\\\\''{}%\\t\\x01' || repeat('n', 55)};

	is(length($quoted), 63, 'a name of 63 bytes');
	sql(qq{CREATE ROLE "$role" LOGIN;
		GRANT SELECT, INSERT, UPDATE ON idem_completions TO "$role"});
	is( sql(qq{SET SESSION AUTHORIZATION "$role";
			SELECT set_config('application_name', $name, false) IS NULL;
			SELECT claimed FROM idem_lease('names', lease => '1 ms');
			SELECT pg_sleep(0.01);
			SELECT held_by = session_user,
				application = current_setting('application_name'),
				length(application) >= 63, client_address
			FROM idem_uncertain WHERE key = 'names'}),
		"f\nt\n\nt|t|t|[local]", 'names in the view');
	is( sql(q{SELECT status, claimed_by::json ->> 'user' = (SELECT rolname FROM pg_roles
				WHERE rolname LIKE 'r"o%')
			FROM idem_resolve('names', true)}),
		'completed|t', 'names: decided, and still known');
}

# ... of a role that was made in a database of another encoding
{
	my $dump = PostgreSQL::Test::Utils::tempdir() . '/leases';

	sql(q{CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0});
	$node->safe_psql('latin', "SET client_encoding = 'LATIN1'; CREATE ROLE \"\xe9t\xe9\" LOGIN SUPERUSER");
	is( $node->safe_psql('postgres',
			q{SELECT claimed FROM idem_lease('latin', lease => '1 ms')},
			extra_params => [ '-U', "\xe9t\xe9" ]),
		't', 'role of another encoding');
	is( sql(q{SELECT pg_sleep(0.01);
			SELECT held_by FROM idem_uncertain WHERE key = 'latin'}),
		"\n?t?", 'role of another encoding in the view');
	$node->command_ok(
		[ 'pg_dump', '-Fc', '-f', $dump, $node->connstr('postgres') ],
		'dump of leases');
	sql(q{CREATE DATABASE copy});
	$node->command_ok(
		[ 'pg_restore', '--exit-on-error', '-d', $node->connstr('copy'), $dump ],
		'restore of leases');
}

# Dump and restore: the holder's token is good in the copy, and no token that
# was given in the source is given again
{
	my $all = q{SELECT key, status, attempts, token, claimed_at, completed_at,
		lease_until, claimed_by, fingerprint, checkpoint, result::text
		FROM idem_completions ORDER BY key};
	my $token;

	is($node->safe_psql('copy', $all), sql($all), 'copy: the same leases');
	is_new($node->safe_psql('copy', q{SELECT token FROM idem_lease('in the copy')}),
		'copy');
	is( $node->safe_psql('copy',
			qq{SELECT idem_complete('held', '"copy"', $held)}),
		'"copy"', 'copy: completed with the token');
	is( $node->safe_psql('copy', q{SELECT string_agg(key, ' ') FROM idem_uncertain}),
		sql(q{SELECT string_agg(key, ' ') FROM idem_uncertain}),
		'copy: the same waits for a decision');
	$token = sql(q{SELECT token FROM idem_lease('after the dump')});
	$highest = $token if $token > $highest;
}

# Generations: leases outlive every retention, wherever they are
sql(q{CREATE FUNCTION pass(passed regclass, by interval) RETURNS void
	LANGUAGE plpgsql AS $$
	DECLARE
		t timestamptz[];
	BEGIN
		SELECT sealed_at INTO t FROM idem_store_state WHERE store = passed;
		FOR i IN coalesce(array_lower(t, 1), 1) .. coalesce(array_upper(t, 1), 0) LOOP
			t[i] := t[i] - by;
		END LOOP;
		UPDATE idem_store_state SET sealed_at = t,
			filling_since = filling_since - by, watermark = watermark - by
			WHERE store = passed;
		EXECUTE format('UPDATE %s SET completed_at = completed_at - %L::interval '
			'WHERE status <> ''leased''', passed, by);
	END $$;
	SELECT idem_create_store('ring', '1 hour', 3)});

sub turn
{
	foreach (1 .. $_[0])
	{
		sql(q{SELECT pass('ring', '31 minutes')});
		sql(q{CALL idem_expire('ring')}) foreach 1 .. 3;
	}
	return;
}

sub ring
{
	my ($key) = @_;
	return sql(qq{SELECT status, generation, result
		FROM idem_lookup('$key', 'ring')});
}

{
	my $slow = session($node);
	my $token;

	$slow->query(q{SELECT idem_once('other', store => 'ring')});
	$token = $slow->query(q{SELECT token FROM idem_lease('slow', lease => '1 ms', store => 'ring')});
	sql(q{CALL idem_expire('ring')});
	turn(1);
	is(ring('slow'), 'leased|1|', 'carried over');
	turn(9);
	like(ring('slow'), qr/^leased\|/, 'carried over again and again');
	is(ring('other'), '', 'other records have expired');
	cmp_ok(sql(q{SELECT generations_expired FROM idem_stores
		WHERE store = 'ring'::regclass}), '>', 2, 'generations were emptied');
	is(sql(q{SELECT key, leases FROM idem_uncertain WHERE store = 'ring'::regclass}),
		'slow|1', 'carried over: it still waits for a decision');
	is($slow->query(qq{SELECT idem_complete('slow', '"late"', $token, 'ring')}),
		'"late"', 'completed after its generation was left behind');
	turn(1);
	like(ring('slow'), qr/^completed\|.\|"late"$/, 'and it stands there');

	# ... while it is being completed, and while its transaction sees the past
	$token = $slow->query(q{SELECT token FROM idem_lease('now', store => 'ring')});
	my ($before) = ring('now') =~ /leased\|(.)/;
	$slow->query(qq{BEGIN; SELECT idem_complete('now', '"undone"', $token, 'ring')});
	turn(1);
	is(ring('now'), "leased|$before|", 'carry-over leaves a key in use alone');
	$slow->query('ROLLBACK');
	sql(q{CALL idem_expire('ring')});
	isnt(ring('now'), "leased|$before|", 'carried over in the next round');
	($before) = ring('now') =~ /leased\|(.)/;
	$slow->query(q{BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM effect});
	turn(1);
	isnt(ring('now'), "leased|$before|", 'carried over under a snapshot');
	like($slow->error(qq{SELECT idem_complete('now', '1', $token, 'ring')}),
		qr/40001/, 'REPEATABLE READ: the move is a serialization failure');
	$slow->query('ROLLBACK');
	is($slow->query(qq{SELECT idem_complete('now', '1', $token, 'ring')}),
		'1', 'and the retry completes');
	$slow->quit;
}

# Ten thousand uncertain keys among many others
{
	sql(q{TRUNCATE idem_completions;
		INSERT INTO idem_completions (key, result)
			SELECT 'done:' || i, '1' FROM generate_series(1, 60000) i;
		SELECT count(*) FROM generate_series(1, 10000) i,
			idem_lease('bulk:' || i, lease => '1 ms');
		SELECT pg_sleep(0.01);
		UPDATE idem_completions SET lease_until = timestamptz '2020-01-01'
			+ substr(key, 6)::int * 7919 % 10007 * interval '1 min'
			WHERE status = 'leased'});
	sql('ANALYZE idem_completions');
	is( sql(q{BEGIN;
			SELECT count(*), count(*) FILTER (WHERE lease_until < before)
			FROM (SELECT lease_until, lag(lease_until) OVER () AS before
				FROM idem_uncertain WHERE store = 'idem_completions'::regclass) u;
			SELECT sum(seq_tup_read) < 10000 FROM pg_stat_xact_user_tables
			WHERE relname LIKE 'idem_completions_%';
			COMMIT}),
		"10000|0\nt", '10,000 uncertain keys, oldest first, by the index');
	is( sql(q{SELECT min(lease_until) = (SELECT lease_until FROM idem_uncertain LIMIT 1)
			FROM idem_completions}),
		't', 'the oldest one');
	is( sql(q{SELECT count(*), count(*) FILTER (WHERE status = 'released')
			FROM (SELECT (idem_resolve(key, key LIKE '%1', NULL, store)).status
				FROM idem_uncertain) x}),
		'10000|9000', '10,000 decisions');
	is(sql(q{SELECT count(*) FROM idem_uncertain}), '0', 'none is left');
}

# A synchronous standby: the commit of a lease waits for it, in a session that
# waits for nothing; and promoted, it goes on with the leases
{
	my $standby = PostgreSQL::Test::Cluster->new('standby');
	my $lazy = session($node);
	my ($token, $second, $third, $lost);

	sql(q{TRUNCATE idem_completions});
	$node->backup('copy');
	$standby->init_from_backup($node, 'copy', has_streaming => 1);
	$standby->append_conf('postgresql.conf', "hot_standby = on\n");
	$standby->start;
	$node->append_conf('postgresql.conf', "synchronous_standby_names = '*'\n");
	$node->reload;
	$node->poll_query_until('postgres',
		q{SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'})
	  or die 'no synchronous standby';

	$standby->stop;
	$lazy->query('SET synchronous_commit = local');
	$lazy->query(q{INSERT INTO effect VALUES ('local')});
	my $pid = $lazy->pid;
	my $waits = qq{SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = $pid};
	$lazy->send(q{SELECT token FROM idem_lease('sync')});
	ok($node->poll_query_until('postgres', $waits), 'a lease waits for the standby');
	$standby->start;
	is_new($token = $lazy->answer, 'standby');

	$standby->stop;
	$lazy->send(qq{SELECT idem_extend('sync', $token, '2 h') > now()});
	ok($node->poll_query_until('postgres', $waits), 'an extension does, too');
	$standby->start;
	is($lazy->answer, 't', 'extended');

	$lazy->query(q{SET synchronous_commit = off});
	is_new($second = $lazy->query(q{SELECT token FROM idem_lease('over', lease => '1 ms')}),
		'standby');
	$node->wait_for_catchup($standby, 'replay');
	is( $standby->safe_psql('postgres',
			q{SELECT key, token FROM idem_uncertain WHERE store = 'idem_completions'::regclass}),
		"over|$second", 'the view on the standby');
	foreach my $call ("idem_lease('sync')", "idem_try_lease('new')",
		"idem_extend('sync', $token, '1 h')", "idem_checkpoint('sync', $token, '1')",
		"idem_complete('sync', '1', $token)", "idem_release('sync', $token)",
		"idem_resolve('over', true)", "idem_resolve('over', true, 1)")
	{
		is(outcome("SELECT $call", $standby), '25006', "standby refuses $call");
	}

	# A failover that loses leases: the primary is gone with what it had in
	# flight, and with what it had not sent yet
	my $open = session($node);
	$open->query(q{BEGIN; SELECT idem_lease('open')});
	is_new(
		sql(q{SET synchronous_commit = off; SELECT max(l.token)
			FROM generate_series(1, 100) i, idem_lease('lease:' || i) l}), 'before');
	$standby->stop;
	$node->append_conf('postgresql.conf', "synchronous_standby_names = ''\n");
	$node->reload;
	is_new($lost = $lazy->query(q{SELECT token FROM idem_lease('lost')}), 'lost');
	is_new(
		sql(q{SELECT max(l.token) FROM generate_series(1, 100) i,
			idem_lease('lost:' || i) l}), 'lost, and more');
	$node->stop('immediate');
	$_->kill9 foreach $open, $lazy;
	$standby->start;
	$standby->promote;

	is_new(outcome(q{SELECT token FROM idem_lease('lost')}, $standby),
		'promoted, the first one');
	is(outcome(qq{SELECT idem_complete('lost', '1', $lost)}, $standby),
		'ID005', 'promoted: who had a lease that was lost does not hold the new one');

	is(outcome(q{SELECT status FROM idem_try_lease('sync')}, $standby),
		'in_progress', 'promoted: the lease runs');
	is(outcome(q{SELECT status FROM idem_try_lease('over')}, $standby),
		'uncertain', 'promoted: the other waits for a decision');
	is(outcome(qq{SELECT idem_complete('sync', '"holder"', $token)}, $standby),
		'"holder"', 'promoted: completed with the token of before');
	$third = outcome(
		q{SELECT token FROM idem_lease('over', on_uncertain => 'retry')}, $standby);
	is_new($third, 'promoted');
	is(outcome(qq{SELECT idem_complete('over', '1', $second)}, $standby),
		'ID005', 'promoted: superseded');
	is(outcome(q{SELECT count(*) FROM idem_completions WHERE key LIKE 'lease:%'}, $standby),
		'100', 'promoted: all that were committed');
	is(outcome(q{SELECT claimed FROM idem_lease('open')}, $standby),
		't', 'promoted: what was in flight is free');
	$standby->stop;
}

# The clock of the server, set by libfaketime
my ($faketime) = glob('/usr/lib/*/faketime/libfaketime.so.1 /usr/lib/faketime/libfaketime.so.1 '
	. '/usr/local/lib/faketime/libfaketime.so.1 /usr/lib64/faketime/libfaketime.so.1');
SKIP:
{
	skip 'libfaketime is not installed', 1 unless $faketime;

	my $file = PostgreSQL::Test::Utils::tempdir() . '/clock';
	my $clock = sub {
		my ($offset) = @_;
		open(my $f, '>', "$file.new") or die $!;
		print $f "$offset\n";
		close($f);
		rename("$file.new", $file) or die $!;
	};
	my $query = sub { return outcome($_[0], $_[1]); };
	my $faked = PostgreSQL::Test::Cluster->new('faked');
	my ($holder, $other, $token, $next, $last);

	$clock->('+0');
	$faked->init;
	{
		local $ENV{LD_PRELOAD} = $faketime;
		local $ENV{FAKETIME_TIMESTAMP_FILE} = $file;
		local $ENV{FAKETIME_NO_CACHE} = 1;
		local $ENV{FAKETIME_DONT_FAKE_MONOTONIC} = 1;
		local $ENV{DONT_FAKE_MONOTONIC} = 1;
		$faked->start;
	}
	$faked->safe_psql('postgres', q{CREATE EXTENSION idem;
		CREATE TABLE effect (key text)});
	my $real = time();
	$clock->('+1d');
	cmp_ok($faked->safe_psql('postgres',
			q{SELECT extract(epoch FROM clock_timestamp())::bigint}) - $real,
		'>', 86000, 'the clock is set forward');
	$clock->('+0');
	$holder = session($faked);
	$other = session($faked);

	# Forward: the lease is over, early as it may be
	$token = $holder->query(q{SELECT token FROM idem_lease('forward', lease => '1 h')});
	is($other->query(q{SELECT status FROM idem_try_lease('forward')}),
		'in_progress', 'forward: before');
	$clock->('+2h');
	is($other->query(q{SELECT status FROM idem_try_lease('forward')}),
		'uncertain', 'forward: after');
	is($other->query(q{SELECT key, overdue BETWEEN '59 min' AND '90 min' FROM idem_uncertain}),
		'forward|t', 'forward: listed');
	is( $other->query(q{SELECT status FROM idem_try_lease('forward',
			on_uncertain => 'retry', retry_window => '1 h')}),
		'uncertain', 'forward: the destination may have forgotten');
	is($holder->query(qq{SELECT idem_extend('forward', $token, '1 h') > clock_timestamp()}),
		't', 'forward: the holder can still extend');
	is($other->query(q{SELECT status FROM idem_try_lease('forward', on_uncertain => 'retry')}),
		'in_progress', 'forward: extended');

	# Back: it runs for longer, and the window is not trusted
	$clock->('-1d');
	is($other->query(q{SELECT status FROM idem_try_lease('forward', on_uncertain => 'retry')}),
		'in_progress', 'back: still in progress');
	is( $holder->query(qq{SELECT idem_extend('forward', $token, '1 ms')
			BETWEEN clock_timestamp() - interval '1 min' AND clock_timestamp() + interval '1 min'}),
		't', 'back: extended by the clock as it is');
	usleep(5_000);
	is( $other->query(q{SELECT status FROM idem_try_lease('forward',
			on_uncertain => 'retry', retry_window => '1 year')}),
		'uncertain', 'back: it was first leased in the future');
	is( $other->query(q{SELECT status, checkpoint FROM idem_try_lease('forward', on_uncertain => 'retry')}),
		'leased|', 'back: taken over');
	like($holder->error(qq{SELECT idem_complete('forward', '1', $token)}),
		qr/ID005/, 'back: superseded');
	$clock->('+0');

	# Inside one transaction, whatever now() says
	foreach my $level ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')
	{
		my $key = lc($level =~ s/ /_/r);

		$holder->query(qq{SELECT idem_lease('$key', lease => '1 h')});
		$other->query("BEGIN ISOLATION LEVEL $level");
		is($other->query(qq{SELECT status FROM idem_try_lease('$key')}),
			'in_progress', "$level: the lease runs");
		$clock->('+2h');
		is($other->query(qq{SELECT status FROM idem_try_lease('$key')}),
			'uncertain', "$level: it has ended since");
		is( $other->query(qq{SELECT status, lease_until > now() + interval '2 h 30 min'
				FROM idem_lease('$key', on_uncertain => 'retry', lease => '1 h')}),
			'leased|t', "$level: taken over, from now on");
		$clock->('+4h');
		is($other->query(qq{SELECT status FROM idem_try_lease('$key')}),
			'uncertain', "$level: over before it is committed");
		like($other->error(qq{SAVEPOINT a; SELECT idem_resolve('$key', true)}),
			qr/ID005/, "$level: and not to be decided there");
		$other->query('ROLLBACK TO a');
		$other->query('COMMIT');
		is( $holder->query(qq{SELECT status FROM idem_resolve('$key', true)}),
			'completed', "$level: decided after the commit");
		$clock->('+0');
	}

	# A holder frozen until somebody else has completed the operation, the
	# record has expired and the key was leased anew
	$faked->safe_psql('postgres', q{SELECT idem_create_store('brief', '1 h', 2)});
	$token = $holder->query(q{SELECT token FROM idem_lease('frozen', lease => '1 min', store => 'brief')});
	kill('STOP', $holder->pid);
	$clock->('+2min');
	$next = $other->query(q{SELECT token FROM idem_lease('frozen', on_uncertain => 'retry', store => 'brief')});
	is($other->query(qq{SELECT idem_complete('frozen', '"other"', $next, 'brief')}),
		'"other"', 'frozen: taken over and completed');
	foreach my $hours (1 .. 6)
	{
		$clock->('+' . 90 * $hours . 'min');
		$other->query(q{CALL idem_expire('brief')}) foreach 1 .. 3;
		$other->query(qq{SELECT idem_once('filler:$hours', store => 'brief')});
	}
	is($other->query(q{SELECT count(*) FROM idem_lookup('frozen', 'brief')}),
		'0', 'frozen: the record has expired');
	is( $other->query(q{SELECT status FROM idem_try_lease('frozen',
			first_sent => clock_timestamp() - interval '9 h', store => 'brief')}),
		'too_late', 'frozen: whoever says when it was sent is told');
	$last = $other->query(q{SELECT token FROM idem_lease('frozen', store => 'brief')});
	cmp_ok($last, '>', $next, 'frozen: leased anew');
	kill('CONT', $holder->pid);
	foreach my $call ("idem_complete('frozen', '1', $token, 'brief')",
		"idem_complete('frozen', '\"other\"', $token, 'brief')",
		"idem_complete('frozen', '\"other\"', $next, 'brief')",
		"idem_extend('frozen', $token, '1 h', 'brief')",
		"idem_checkpoint('frozen', $token, '1', 'brief')")
	{
		like($holder->error("SELECT $call"), qr/ID005/, "frozen: $call");
	}
	is($holder->query(qq{SELECT idem_release('frozen', $token, 'brief')}),
		'f', 'frozen: nothing to release');
	is( $other->query(q{SELECT status, token, attempts, checkpoint FROM idem_lookup('frozen', 'brief')}),
		"leased|$last|1|", 'frozen: nothing has changed');
	is($other->query(qq{SELECT idem_complete('frozen', '"anew"', $last, 'brief')}),
		'"anew"', 'frozen: the one who has the lease completes it');

	$_->quit foreach $holder, $other;
	$faked->stop;
}

done_testing();
