# A crash at any point: key, effect and result survive together or not at all,
# and what a duplicate was told is still true afterwards.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

# Nothing but a commit, a replay or the WAL writer may flush WAL here.
my $node = idem_node('main', conf => q{
restart_after_crash = on
log_statement = none
autovacuum = off
bgwriter_lru_maxpages = 0
checkpoint_timeout = 1h
wal_writer_delay = 10s
max_wal_size = 1GB
});

$node->safe_psql(
	'postgres', q{
	CREATE TABLE effect (key text NOT NULL);
	CREATE FUNCTION job(k text) RETURNS boolean LANGUAGE plpgsql AS $$
	BEGIN
		IF NOT (SELECT claimed FROM idem_claim(k)) THEN
			RETURN false;
		END IF;
		INSERT INTO effect VALUES (k);
		PERFORM idem_complete(k, to_jsonb(k));
		RETURN true;
	END $$;
	CREATE FUNCTION run_job(j jsonb) RETURNS jsonb LANGUAGE sql AS $$
		INSERT INTO effect VALUES (j #>> '{}') RETURNING j $$});

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

sub wal_writer
{
	return sql(q{SELECT pid FROM pg_stat_activity
		WHERE backend_type = 'walwriter'});
}

# Kills one process the hard way and waits until the server has recovered.
sub crash
{
	my ($pid) = @_;
	my $wal_writer = wal_writer();

	kill('KILL', $pid) or die "cannot kill $pid: $!";
	$node->poll_query_until('postgres',
		"SELECT pid <> $wal_writer FROM pg_stat_activity "
		  . "WHERE backend_type = 'walwriter'")
	  or die 'the server did not come back';
	return;
}

# How often the effect of a key is there, and what the store says of it
sub known
{
	my ($key) = @_;
	return sql("SELECT (SELECT count(*) FROM effect WHERE key = '$key'), "
		  . "(SELECT status FROM idem_lookup('$key')), "
		  . "(SELECT result FROM idem_lookup('$key'))");
}

# A backend dies between the steps

my @steps = (
	"SELECT claimed FROM idem_claim('KEY')",
	"INSERT INTO effect VALUES ('KEY')",
	"SELECT idem_complete('KEY', '1')",
	"SAVEPOINT a",
	"SELECT claimed FROM idem_claim('KEY2')",
	"SELECT idem_complete('KEY2', '2')");

foreach my $count (1, 3, 6)
{
	my $key = "step$count";
	my $dying = session($node);
	my $waiting = session($node);

	$dying->query('BEGIN');
	foreach my $step (@steps[ 0 .. $count - 1 ])
	{
		$dying->query($step =~ s/KEY/$key/r);
	}
	$waiting->send("SELECT job('$key')");
	$waiting->wait_blocked;
	crash($dying->pid);
	like($waiting->answer_error, qr/server closed the connection|57P02/,
		"crash after $count steps: the waiter is not told anything");
	is(known($key), '0||', "crash after $count steps: nothing is left");
	is(known("${key}2"), '0||', "crash after $count steps: nothing at all");
	is(sql("SELECT job('$key')"), 't', "crash after $count steps: a retry runs");
	is(sql("SELECT job('$key')"), 'f', "crash after $count steps: once");
	$_->kill9 foreach $dying, $waiting;
}

# A client dies, a backend is terminated: the next waiter becomes the claimer
# without anything having to time out

foreach my $how ('client', 'backend')
{
	my $dying = session($node);
	my $waiting = session($node);

	$dying->query("BEGIN; SELECT job('$how')");
	$waiting->query("SET idem.wait_timeout = -1");
	$waiting->send("SELECT job('$how')");
	$waiting->wait_blocked;
	if ($how eq 'client')
	{
		$dying->kill9;
	}
	else
	{
		sql("SELECT pg_terminate_backend(${\ $dying->pid})");
		$dying->kill9;
	}
	is($waiting->answer, 't', "$how dies: the waiter claims");
	is(known($how), qq{1|completed|"$how"}, "$how dies: done once");
	$waiting->quit;
}

# What was committed is there after an immediate shutdown, its
# acknowledgement seen or not

sql("SELECT job('committed')");
my $open = session($node);
$open->query("BEGIN; SELECT job('open')");
$node->stop('immediate');
$open->kill9;
$node->start;
is(known('committed'), '1|completed|"committed"', 'immediate: committed');
is(known('open'), '0||', 'immediate: not committed');
is(sql("SELECT job('committed'), job('open')"), 'f|t', 'immediate: retries');

# Asynchronous commits.  With the WAL writer stopped nothing is flushed behind
# our back.  What it takes to lose a completion is shown first; then that it
# is never lost once it was replayed.

my $stopped;

# Completes a key by a commit that is not flushed; returns where that ends.
sub complete_unflushed
{
	my ($key, $commands) = @_;
	my $lazy = session($node);
	my $lsn;

	$stopped = wal_writer();
	kill('STOP', $stopped) or die "cannot stop $stopped: $!";
	$lazy->query('SET synchronous_commit = off');
	$lazy->query($commands // "SELECT job('$key')");
	$lsn = $lazy->query('SELECT pg_current_wal_insert_lsn()');
	$lazy->quit;
	return $lsn;
}

sub flushed
{
	my ($lsn) = @_;
	return sql("SELECT pg_current_wal_flush_lsn() >= '$lsn'");
}

my $lsn = complete_unflushed('lost');
is(known('lost'), '1|completed|"lost"', 'unflushed: visible');
is(flushed($lsn), 'f', 'unflushed: a look-up flushes nothing');
crash($stopped);
is(known('lost'), '0||', 'unflushed: key and effect are lost together');

my $in_subtransaction = q{
	BEGIN; SAVEPOINT a; SAVEPOINT b;
	SELECT claimed FROM idem_claim('KEY');
	INSERT INTO effect VALUES ('KEY');
	RELEASE b;
	SELECT idem_complete('KEY', '"KEY"');
	RELEASE a; COMMIT};
my $plain_insert = q{
	BEGIN; INSERT INTO effect VALUES ('KEY');
	INSERT INTO idem_completions (key, result) VALUES ('KEY', '"KEY"');
	COMMIT};
my $over_released = q{
	BEGIN; INSERT INTO effect VALUES ('KEY');
	INSERT INTO idem_completions (key, status) VALUES ('KEY', 'released');
	SELECT claimed FROM idem_claim('KEY');
	SELECT idem_complete('KEY', '"KEY"'); COMMIT};
my $many_subtransactions = q{
	BEGIN;
	DO $$ BEGIN FOR i IN 1..200 LOOP
		BEGIN PERFORM job('KEY ' || i);
		EXCEPTION WHEN division_by_zero THEN NULL; END;
	END LOOP; END $$;
	SAVEPOINT a; SELECT job('KEY'); RELEASE a; COMMIT};
my $freeze = 'VACUUM (FREEZE, TRUNCATE off) idem_completions_0';

# name, how it is completed (default: job()), what is done in between, replay
# and its answer
my @replays = (
	[ 'claim', undef, undef, "SELECT status FROM idem_claim('KEY')", 'completed' ],
	[
		'try_claim', undef, undef,
		"SELECT status FROM idem_try_claim('KEY')", 'completed'
	],
	[
		'batch', undef, undef,
		"SELECT count(*) FROM idem_claim_batch(ARRAY['KEY', 'KEY']) "
		  . "WHERE status = 'completed'", '2'
	],
	[ 'once', undef, undef, "SELECT idem_once('KEY')", 'f' ],
	[
		'run', undef, undef,
		"SELECT status FROM idem_run('KEY', 'run_job', '1')", 'completed'
	],
	[
		'other request',
		q{BEGIN; SELECT claimed FROM idem_claim('KEY', '1');
		INSERT INTO effect VALUES ('KEY');
		SELECT idem_complete('KEY', '"KEY"'); COMMIT},
		undef, "SELECT status FROM idem_try_claim('KEY', '2')", 'key_reused'
	],
	[
		'serializable', undef, undef,
		"BEGIN ISOLATION LEVEL SERIALIZABLE; "
		  . "SELECT status FROM idem_claim('KEY')", 'completed'
	],
	[
		'hinted', undef, 'SELECT count(*) FROM idem_completions',
		"SELECT status FROM idem_claim('KEY')", 'completed'
	],
	[
		'frozen', undef, $freeze,
		"SELECT status FROM idem_claim('KEY')", 'completed'
	],
	[
		'subtransaction', $in_subtransaction, undef,
		"SELECT status FROM idem_claim('KEY')", 'completed'
	],
	[
		'subtransaction frozen', $in_subtransaction, $freeze,
		"SELECT status FROM idem_claim('KEY')", 'completed'
	],
	[
		'many subtransactions', $many_subtransactions, undef,
		"SELECT status FROM idem_claim('KEY')", 'completed'
	],
	[
		'plain insert', $plain_insert, undef,
		"SELECT status FROM idem_claim('KEY')", 'completed'
	],
	[
		'over released', $over_released, undef,
		"SELECT status FROM idem_claim('KEY')", 'completed'
	],
	[
		'over released frozen', $over_released, $freeze,
		"SELECT status FROM idem_claim('KEY')", 'completed'
	],);

foreach my $replay (@replays)
{
	my ($name, $complete, $between, $again, $answer) = @$replay;
	my $reader = session($node);

	# The reader is there before, and loads all it needs
	$reader->query("SELECT idem_try_claim('nobody'), idem_release('nobody')");
	$lsn = complete_unflushed($name,
		defined $complete ? $complete =~ s/KEY/$name/gr : undef);
	sql($between) if defined $between;
	is( sql(q{SELECT bool_and(age(c.xmin) > age(p.relfrozenxid))
			FROM idem_completions_0 c, pg_class p
			WHERE p.oid = 'idem_completions_0'::regclass}),
		't', "replay ($name): frozen")
	  if $name =~ /frozen/;
	is(flushed($lsn), 'f', "replay ($name): not flushed before");
	is($reader->query($again =~ s/KEY/$name/gr), $answer, "replay ($name)");
	is(flushed($lsn), 't', "replay ($name): flushed");
	crash($stopped);
	is(known($name), qq{1|completed|"$name"}, "replay ($name): still there");
	$reader->kill9;
}

# One that waits for the key, and is answered by the commit
{
	my $reader = session($node);
	my $lazy = session($node);

	$stopped = wal_writer();
	$lazy->query("SET synchronous_commit = off; BEGIN; SELECT job('waited')");
	$reader->send("SELECT job('waited')");
	$reader->wait_blocked;
	kill('STOP', $stopped);
	$lazy->query('COMMIT');
	is($reader->answer, 'f', 'replay after a wait');
	crash($stopped);
	is(known('waited'), '1|completed|"waited"', 'replay after a wait: there');
	$_->kill9 foreach $reader, $lazy;
}

# One that cannot lock the key, and is answered without
{
	my $holder = session($node);
	my $reader = session($node);

	$holder->query("BEGIN; SELECT claimed FROM idem_claim('peek'); "
		  . "SELECT idem_release('peek')");
	$lsn = complete_unflushed('peek', $plain_insert =~ s/KEY/peek/gr);
	is(flushed($lsn), 'f', 'replay without the lock: not flushed before');
	is($reader->query("SELECT status FROM idem_try_claim('peek')"),
		'completed', 'replay without the lock');
	crash($stopped);
	is(known('peek'), '1|completed|"peek"', 'replay without the lock: there');
	$_->kill9 foreach $holder, $reader;
}

# In the middle of work, twice: each key's effect and record come and go
# together, and nothing runs twice

my $bench = PostgreSQL::Test::Utils::tempdir() . '/bench.sql';
append_to_file($bench, <<'END');
\set n random(1, 3000)
\set lazy random(1, 2)
\if :lazy = 1
SET synchronous_commit = off;
\else
SET synchronous_commit = on;
\endif
BEGIN;
SELECT job('bench' || :n);
COMMIT;
END

foreach my $round (1, 2)
{
	my $before = sql(q{SELECT count(*) FROM effect});
	my $load = IPC::Run::start(
		[
			$node->installed_command('pgbench'), '-n', '-c', '6', '-T', '60',
			'-f', $bench, $node->connstr('postgres') . ' application_name=load'
		],
		'>', \my $out, '2>', \my $err);

	$node->poll_query_until('postgres',
		"SELECT count(*) > $before + 300 FROM effect")
	  or die 'no load';
	crash(sql(q{SELECT pid FROM pg_stat_activity
		WHERE application_name = 'load' LIMIT 1}));
	$load->finish;
	is( sql(q{SELECT count(*) FROM effect FULL JOIN idem_completions c
			USING (key) WHERE effect IS NULL OR c IS NULL
			AND key LIKE 'bench%'}),
		'0', "load $round: effects and records agree");
	is( sql(q{SELECT count(*) FROM (SELECT FROM effect GROUP BY key
			HAVING count(*) > 1) x}),
		'0', "load $round: no effect is there twice");
}
sql(q{SELECT job('bench' || n) FROM generate_series(1, 3000) n});
is( sql(q{SELECT count(*), count(DISTINCT key) FROM effect
		WHERE key LIKE 'bench%'}),
	'3000|3000', 'load: all was done once');

$node->stop;
done_testing();
