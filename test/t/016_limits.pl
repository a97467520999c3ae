# Settings and limits of the whole server that would stop ordinary sessions:
# expiry goes on where it can, and where it cannot the log does not fill up.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

# One slot is left for workers: the server's own logical replication launcher
# and idem's launcher have the other two.
my $node = idem_node(
	'main',
	preload => 1,
	conf => q{
idem.naptime = 1
max_worker_processes = 3
log_statement = none
log_line_prefix = '%m [%p] %b '
});

# The test's own sessions are under no setting that it gives to the server.
$ENV{PGOPTIONS} = join ' ', map { "-c $_=0" } 'statement_timeout',
  'lock_timeout', 'idle_in_transaction_session_timeout',
  'default_transaction_read_only',
  $node->pg_version >= 17 ? 'transaction_timeout' : ();

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

my $number = 0;

# A record goes when it is old enough, and what the log says meanwhile.
sub log_until_expired
{
	my ($what) = @_;
	my $from = -s $node->logfile;
	my $key = 'k' . ++$number;

	sql("INSERT INTO s (key) VALUES ('$key')");
	$node->poll_query_until('postgres',
		"SELECT count(*) = 0 FROM s WHERE key = '$key'")
	  or die "$what: never expired";
	return slurp_file($node->logfile, $from);
}

# Messages in the log by and about the processes of idem
sub lines_of_idem
{
	my ($log) = @_;
	return grep { /(\] idem |"idem (launcher|worker)")/ && !/HINT:/
		  && !/received SIGHUP/ } split /\n/, $log;
}

# For so many seconds, which are so many cycles of the launcher at least
sub log_for
{
	my ($seconds) = @_;
	my $from = -s $node->logfile;
	my $until = sql("SELECT clock_timestamp() + interval '$seconds seconds'");

	$node->poll_query_until('postgres',
		"SELECT clock_timestamp() > '$until'::timestamptz");
	return slurp_file($node->logfile, $from);
}

sql(q{SELECT idem_create_store('s', '1 second', 2)});
is(join("\n", lines_of_idem(log_until_expired('at first'))),
	'', 'a quiet log at first');

# No worker slot: said once, and expiry goes on as soon as there is one.
# A parallel query takes the slot.
{
	my $taker = session($node);
	my $from;
	my @lines;
	my $mode = $node->pg_version >= 16 ? 'debug_parallel_query'
	  : 'force_parallel_mode';

	$taker->query("SET $mode = on; SET max_parallel_workers_per_gather = 1; "
		  . 'SET parallel_leader_participation = off');
	$from = -s $node->logfile;
	for (;;)
	{
		# until it was not idem's worker that had the slot
		my $taken;

		$taker->send('SELECT pg_sleep(1000)');
		foreach my $i (1 .. 20)
		{
			last if $taken;
			select(undef, undef, undef, 0.1);
			$taken = sql(q{SELECT count(*) FROM pg_stat_activity
				WHERE backend_type = 'parallel worker'});
		}
		last if $taken;
		sql('SELECT pg_cancel_backend(' . $taker->pid . ')');
		$taker->answer_error;
	}
	sql("INSERT INTO s (key) VALUES ('no slot')");
	log_for(6);
	is(sql(q{SELECT count(*) FROM s WHERE key = 'no slot'}),
		'1', 'no slot: nothing expires');
	is(sql(q{SELECT idem_once('k', store => 's')}), 't', 'no slot: claims go on');
	@lines = lines_of_idem(slurp_file($node->logfile, $from));
	is(scalar(@lines), 1, 'no slot: one line in the log');
	like($lines[0] // '', qr/LOG:  idem has no worker slot/, 'no slot: it says so');

	sql('SELECT pg_cancel_backend(' . $taker->pid . ')');
	like($taker->answer_error, qr/57014/, 'the slot is free again');
	$node->poll_query_until('postgres',
		q{SELECT count(*) = 0 FROM s WHERE key = 'no slot'})
	  or die 'never expired';
	pass('a slot: expiry goes on');
	$taker->quit;
}

# Settings that stop others do not stop it, be they the server's or the
# database's
my %harmful = (
	'default_transaction_read_only' => 'on',
	'default_transaction_isolation' => 'serializable',
	'default_transaction_deferrable' => 'on',
	'statement_timeout' => '1',
	'lock_timeout' => '1',
	'idle_in_transaction_session_timeout' => '1',
	'row_security' => 'off',
	'enable_indexscan' => 'off',
	'transform_null_equals' => 'on',
	'session_replication_role' => 'replica',
	'synchronous_commit' => 'remote_apply');

sub expires_under
{
	my ($what, %settings) = @_;
	my @names = sort keys %settings;
	my $log;

	foreach my $name (@names)
	{
		sql("ALTER SYSTEM SET $name = '$settings{$name}'");
		sql("ALTER DATABASE postgres SET $name = '$settings{$name}'");
	}
	sql('SELECT pg_reload_conf()');
	$node->poll_query_until('template1',
		'SELECT count(*) = ' . @names . ' FROM pg_file_settings '
		  . 'WHERE applied AND name IN ('
		  . join(', ', map { "'$_'" } @names) . ')');
	$log = log_until_expired($what);
	pass("$what: expiry goes on");
	is(join("\n", lines_of_idem($log)), '', "$what: not a word in the log");
	foreach my $name (@names)
	{
		sql("ALTER SYSTEM RESET $name");
		sql("ALTER DATABASE postgres RESET $name");
	}
	sql('SELECT pg_reload_conf()');
	return;
}

expires_under($_, $_ => $harmful{$_})
  foreach 'default_transaction_read_only', 'statement_timeout', 'lock_timeout';
expires_under('all of them', %harmful);

# transaction_timeout also holds while a worker is connecting, where nothing
# can be pinned yet: then a few words a cycle are to be had, no more
if ($node->pg_version >= 17)
{
	# New sessions, even the test's own, can be hit while they begin
	my $admin = session($node);
	my $from = -s $node->logfile;

	sql(q{INSERT INTO s (key) VALUES ('timeout')});
	$admin->query('ALTER SYSTEM SET transaction_timeout = 1');
	$admin->query('SELECT pg_reload_conf()');
	$admin->query('SELECT pg_sleep(6)');
	cmp_ok(scalar(lines_of_idem(slurp_file($node->logfile, $from))),
		'<=', 40, 'transaction_timeout: the log does not fill up');
	$admin->query('ALTER SYSTEM SET transaction_timeout = 500');
	$admin->query('SELECT pg_reload_conf()');
	$node->poll_query_until('postgres',
		q{SELECT count(*) = 0 FROM s WHERE key = 'timeout'})
	  or die 'never expired';
	pass('transaction_timeout: expiry goes on');
	$admin->query('ALTER SYSTEM RESET transaction_timeout');
	$admin->query('SELECT pg_reload_conf()');
	$admin->quit;
}

# A lock on the bookkeeping that is held for long
{
	my $holder = session($node);
	my @lines;

	$holder->query('BEGIN; LOCK idem_store_state');
	@lines = lines_of_idem(log_for(6));
	cmp_ok(scalar(@lines), '<=', 20,
		'bookkeeping locked: the log does not fill up');
	$holder->query('COMMIT');
	log_until_expired('bookkeeping locked');
	pass('bookkeeping locked: expiry goes on afterwards');
	$holder->quit;
}

# No slot from the start, not even for the launcher
$node->append_conf('postgresql.conf', "max_worker_processes = 1\n");
$node->restart;
like(
	sql('SELECT DISTINCT worker FROM idem_stores'),
	qr/^none: the launcher is not running$/,
	'no launcher: idem_stores says so');
is(sql(q{SELECT idem_once('other', store => 's')}), 't',
	'no launcher: claims go on');
is(sql(q{SELECT idem_once('other', store => 's')}), 'f',
	'no launcher: replays go on');

$node->stop;
done_testing();
