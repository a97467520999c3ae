# The worker is never in the way of what is done with databases, and the
# launcher always comes back.
#
# Each database has a store that always has work: emptying it takes a while
# and then fails, so that every round of the worker is long and none is the
# last.  Its trigger draws from a sequence, which counts the visits.

use strict;
use warnings;

use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $times = 100;
my $node = idem_node(
	'main',
	preload => 1,
	conf => q{
idem.naptime = 1
restart_after_crash = on
log_statement = none
log_line_prefix = '%m [%p] %b '
});
my $dir = PostgreSQL::Test::Utils::tempdir();

sub sql
{
	my ($sql, $database) = @_;
	return $node->safe_psql($database // 'postgres', $sql);
}

sub make_busy
{
	my ($database) = @_;

	sql("CREATE DATABASE $database");
	sql(q{
		CREATE EXTENSION idem;
		CREATE SEQUENCE visits;
		SELECT idem_create_store('busy', '1 second', 2);
		INSERT INTO busy (key, completed_at, generation)
			SELECT 'k' || g, now() - interval '1 hour', x
			FROM generate_series(1, 10) g, generate_series(0, 1) x;
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM nextval('public.visits');
			PERFORM pg_sleep(0.2);
			RAISE EXCEPTION 'not today';
		END $$;
		CREATE TRIGGER refuse BEFORE TRUNCATE ON busy_0
			FOR EACH STATEMENT EXECUTE FUNCTION refuse();
		CREATE TRIGGER refuse BEFORE TRUNCATE ON busy_1
			FOR EACH STATEMENT EXECUTE FUNCTION refuse()}, $database);
	return;
}

# How often a database was visited
sub visits
{
	my ($database) = @_;
	return sql('SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM visits',
		$database);
}

sub await_visits
{
	my ($database, $from, $more) = @_;
	$node->poll_query_until($database,
		"SELECT is_called AND last_value >= $from + $more FROM visits")
	  or die "$database is not visited";
	return;
}

sub await
{
	my ($query, $what) = @_;
	$node->poll_query_until('postgres', $query) or die "never: $what";
	return;
}

sub log_of
{
	my ($from) = @_;
	return slurp_file($node->logfile, $from);
}

foreach my $database ('source', 'name_a', 'moved', 'known')
{
	make_busy($database);
}
await_visits($_, 0, 1) foreach 'source', 'name_a', 'moved', 'known';

# What is to be seen of it
is( sql(q{SELECT datname IS NULL FROM pg_stat_activity
		WHERE backend_type = 'idem launcher'}),
	't', 'the launcher can be seen');
await(
	q{SELECT count(*) > 0 FROM pg_stat_activity
	WHERE backend_type = 'idem worker' AND query = 'expiring records'
	AND datname IN ('source', 'name_a', 'moved', 'known')}, 'a worker at work');
is( sql('SELECT DISTINCT worker FROM idem_stores', 'known'),
	'running', 'idem_stores says that a worker runs');

# A hundred times each, some of them right when the worker is in there.
# Statements that a worker is in the way of fail after 5 seconds.

sql(q{
	CREATE TABLE met (database text, there boolean);
	CREATE PROCEDURE await_worker(name text) LANGUAGE plpgsql AS $$
	DECLARE
		there boolean;
	BEGIN
		FOR i IN 1 .. 6000 LOOP
			PERFORM pg_stat_clear_snapshot();
			there := EXISTS (SELECT FROM pg_stat_activity
				WHERE backend_type = 'idem worker' AND datname = name);
			EXIT WHEN there;
			PERFORM pg_sleep(0.005);
		END LOOP;
		INSERT INTO met VALUES (name, there);
	END $$;
	SET allow_in_place_tablespaces = on;
	CREATE TABLESPACE elsewhere LOCATION ''});

my %script;
foreach my $i (1 .. $times)
{
	my $await = $i % 20 == 0;
	my $copies = $i % 2 ? 'copies' : 'more copies';
	my ($old, $new) = $i % 2 ? ('name_a', 'name_b') : ('name_b', 'name_a');
	my $tablespace = $i % 2 ? 'elsewhere' : 'pg_default';

	$script{$copies} .= "CALL await_worker('source');\n" if $await;
	$script{$copies} .= "CREATE DATABASE copy_$i TEMPLATE source;\n";
	$script{$copies} .= "CALL await_worker('copy_$i');\n" if $i % 25 == 5;
	$script{$copies} .= "DROP DATABASE copy_$i;\n";

	$script{rename} .= "CALL await_worker('$old');\n" if $await;
	$script{rename} .= "ALTER DATABASE $old RENAME TO $new;\n";

	$script{move} .= "CALL await_worker('moved');\n" if $await;
	$script{move} .= "ALTER DATABASE moved SET TABLESPACE $tablespace;\n";
}

my %run;
foreach my $name (sort keys %script)
{
	my $file = "$dir/" . ($name =~ s/ /_/gr);
	append_to_file("$file.sql", $script{$name});
	$run{$name} = {
		log => "$file.log",
		psql => IPC::Run::start(
			[
				$node->installed_command('psql'), '-XAtq',
				'-v', 'ON_ERROR_STOP=1',
				'-d', $node->connstr('postgres'), '-f', "$file.sql"
			],
			'>', "$file.log", '2>&1')
	};
}
foreach my $name (sort keys %run)
{
	$run{$name}{psql}->finish;
	is(slurp_file($run{$name}{log}), '', "$name: every statement succeeded");
}
is(sql('SELECT count(*) FROM met WHERE there IS NOT TRUE'),
	'0', 'a worker was there whenever one was awaited');
is(sql('SELECT count(*) FROM met'), $times * 3 / 20 + $times / 25,
	'and it was awaited');
is(sql(q{SELECT count(*) FROM pg_database WHERE datname ~ '^copy_'}),
	'0', 'no copy is left');
foreach my $database ('source', 'name_a', 'moved', 'known')
{
	await_visits($database, visits($database), 1);
	pass("$database is still visited");
}

# Databases that come and go elsewhere do not wait for a worker that is in
# the middle of something
{
	my $slowest = 0;

	foreach my $i (1 .. 10)
	{
		sql(q{CALL await_worker('known')});
		my $begin = time;
		sql('CREATE DATABASE unrelated');
		sql('DROP DATABASE unrelated');
		my $took = time - $begin;
		$slowest = $took if $took > $slowest;
	}
	note("slowest CREATE and DROP DATABASE: $slowest s");
	cmp_ok($slowest, '<', 10, 'an unrelated database comes and goes');
}

# A copy is visited in the next cycle, whatever the bookkeeping that it came
# with says; so is a database that gets the extension only now
{
	my $before = visits('known');
	my $copied;

	sql('CREATE DATABASE copied TEMPLATE source');
	$copied = visits('copied');
	await_visits('copied', $copied, 1);
	cmp_ok(visits('known') - $before, '<=', 6, 'a copy is visited soon');
	is( sql(q{SELECT count(*) FROM idem_store_state
			WHERE store_name = 'busy' AND origin LIKE '%/' || (
				SELECT oid FROM pg_database WHERE datname = 'copied')},
			'copied'),
		'1',
		'its bookkeeping is its own now');

	sql('CREATE DATABASE late');
	await_visits('known', visits('known'), 2);
	$before = visits('known');
	sql(q{CREATE EXTENSION idem; SELECT idem_create_store('s', '1 second', 2);
		INSERT INTO s (key, completed_at, generation)
			VALUES ('a', now() - interval '1 hour', 0)}, 'late');
	$node->poll_query_until('late', q{SELECT filling_since IS NOT NULL
		FROM idem_store_status('s')}) or die 'never visited';
	cmp_ok(visits('known') - $before, '<=', 6,
		'a database that got the extension is visited soon');
}

# A database without the extension is looked into once, and then rarely.  Only
# in this one does a worker say when it ends.
{
	my $log = -s $node->logfile;
	my $visit = qr/ idem worker DEBUG:  proc_exit\(/;

	sql(q{CREATE DATABASE without;
		ALTER DATABASE without SET log_min_messages = debug3});
	$log = $node->wait_for_log($visit, $log);
	await_visits('known', visits('known'), 8);
	my @visits = log_of($log) =~ /$visit/g;
	cmp_ok(scalar @visits, '<=', 2, 'a database without it is visited rarely');
	$node->wait_for_log($visit, $log);
	pass('but again');
	sql('DROP DATABASE without');
}

# Databases that allow no connections, and templates, are left alone
{
	my $log = -s $node->logfile;
	my %before;

	sql('CREATE DATABASE closed TEMPLATE source');
	sql('ALTER DATABASE closed ALLOW_CONNECTIONS false');
	sql('CREATE DATABASE pattern TEMPLATE source IS_TEMPLATE true');
	await_visits('known', visits('known'), 2);
	sql(q{ALTER SYSTEM SET idem.worker = off; SELECT pg_reload_conf()});
	await(
		q{SELECT NOT EXISTS (SELECT FROM pg_stat_activity
		WHERE backend_type = 'idem worker')}, 'no worker');
	sql('ALTER DATABASE closed ALLOW_CONNECTIONS true');
	%before = map { $_ => visits($_) } 'closed', 'pattern';
	sql('ALTER DATABASE closed ALLOW_CONNECTIONS false');
	is(sql('SELECT DISTINCT worker FROM idem_stores', 'known'),
		'none: idem.worker is off', 'idem_stores says that no worker runs');
	$log = -s $node->logfile;
	sql(q{ALTER SYSTEM RESET idem.worker; SELECT pg_reload_conf()});
	await_visits('known', visits('known'), 5);
	sql(q{ALTER SYSTEM SET idem.worker = off; SELECT pg_reload_conf()});
	await(
		q{SELECT NOT EXISTS (SELECT FROM pg_stat_activity
		WHERE backend_type = 'idem worker')}, 'no worker');
	sql('ALTER DATABASE closed ALLOW_CONNECTIONS true');
	is(visits($_), $before{$_}, "$_: no visit") foreach 'closed', 'pattern';
	unlike(log_of($log), qr/ idem \w+ (FATAL|ERROR|PANIC)/,
		'no visit was tried');
	sql(q{ALTER SYSTEM RESET idem.worker; SELECT pg_reload_conf()});
	await_visits('closed', $before{closed}, 1);
	pass('closed: visited when it is open again');
}

# Whoever ends the launcher, or a worker, gets a new one
sub launcher
{
	return sql(q{SELECT pid FROM pg_stat_activity
		WHERE backend_type = 'idem launcher'});
}

# Shoots until one is hit: a worker may have gone by then, or be going.
sub kill_process
{
	my ($type) = @_;
	my $from = -s $node->logfile;

	for (;;)
	{
		sql(q{CALL await_worker('known')});
		my $pid = sql("SELECT min(pid) FROM pg_stat_activity "
			  . "WHERE backend_type = '$type'");

		next if $pid eq '' || !kill('KILL', $pid);
		foreach my $i (1 .. 50)
		{
			return if log_of($from) =~ /\(PID $pid\) was terminated by signal 9/;
			select(undef, undef, undef, 0.1);
		}
	}
}

sub await_other_launcher
{
	my ($pid) = @_;
	await(
		"SELECT count(*) > 0 FROM pg_stat_activity "
		  . "WHERE backend_type = 'idem launcher' AND pid <> $pid",
		'another launcher');
	return;
}

{
	my $pid = launcher();
	my $seen = visits('known');

	sql("SELECT pg_terminate_backend($pid)");
	await_other_launcher($pid);
	await_visits('known', $seen, 3);
	pass('the launcher comes back after pg_terminate_backend');

	sql(q{CALL await_worker('known')});
	sql(q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE backend_type = 'idem worker'});
	await_visits('known', visits('known'), 2);
	is(launcher() eq $pid, '', 'the launcher outlives its worker');

	foreach my $type ('launcher', 'worker')
	{
		$pid = launcher();
		kill_process("idem $type");
		await_other_launcher($pid);
		$node->poll_query_until('known', 'SELECT true');
		await_visits('known', visits('known'), 2);
		pass("kill -9 of the $type: expiry goes on");
	}
}

# Shutdown, with the worker in the middle of something
foreach my $mode ('fast', 'immediate', 'fast')
{
	my $log = -s $node->logfile;

	sql(q{CALL await_worker('known')});
	$node->stop($mode);
	$node->start;
	unlike(log_of($log),
		qr/PANIC|TRAP|terminated by signal|not properly shut down/,
		"$mode shutdown: clean")
	  if $mode eq 'fast';
	await_visits('known', visits('known'), 1);
	pass("$mode shutdown: expiry goes on");
}

$node->stop;
done_testing();
