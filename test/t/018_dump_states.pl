# Dumps, restores and pg_upgrade of stores whose generations are in every
# state of expiry, with the worker running where they are restored: every key
# answers as before, and none goes early.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $conf = q{
idem.naptime = 1
log_statement = none
log_line_prefix = '%m [%p] %b '
};
my $old = idem_node('old', preload => 1, conf => "$conf\nidem.worker = off\n");
my $new = idem_node('new', preload => 1, conf => $conf);
my $dump = PostgreSQL::Test::Utils::tempdir();

sub run
{
	my ($node, $database, $sql) = @_;
	return $node->safe_psql($database, $sql);
}

sub source { return run($old, 'source', $_[0]); }

# One store for each state that the generations of a ring can be in.  The
# retention is an hour; where time must have passed, what was noted, and the
# records, are moved back by a day.
my @stores = qw(idem_completions as_made filling written sealed emptied turned
  leased);

sub fill
{
	my ($store, $generation, $completed_at) = @_;

	source(qq{INSERT INTO $store (key, result, completed_at, generation)
		SELECT '$store $generation ' || g, ('{"a": ' || g || '.10}')::json,
			$completed_at, $generation
		FROM generate_series(1, 20) g;
		INSERT INTO $store (key, result, completed_at, generation)
			VALUES ('$store $generation', to_json(repeat('x', 100000)),
				$completed_at, $generation)});
	return;
}

# Lets a day pass and does what is due
sub expire
{
	my ($store) = @_;

	source("CALL idem_expire('$store')");
	source(q{UPDATE idem_store_state
		SET filling_since = filling_since - interval '1 day',
			sealed_at = ARRAY(SELECT t - interval '1 day'
				FROM unnest(sealed_at) WITH ORDINALITY x(t, n) ORDER BY n)
		WHERE store_name = '} . $store . q{'});
	source("CALL idem_expire('$store')");
	return;
}

sub states
{
	my ($store) = @_;
	return source(
		"SELECT states FROM idem_stores WHERE store = '$store'::regclass");
}

run($old, 'postgres', q{CREATE ROLE clerk;
	ALTER ROLE clerk SET idem.wait_timeout = '7s';
	CREATE DATABASE source});
run($old, 'postgres', q{ALTER DATABASE source SET idem.wait_timeout = '8s'});
source('CREATE EXTENSION idem');
source("SELECT idem_create_store('$_', '1 hour', 3)")
  foreach 'dropped', @stores[ 1 .. $#stores ];
source(q{SELECT idem_set_retention('90 days')});

fill('idem_completions', $_, 'clock_timestamp()') foreach 0 .. 3;
fill('filling', 0, 'clock_timestamp()');
{
	my $writer = session($old, 'source');

	fill('written', 0, 'clock_timestamp()');
	$writer->query(q{BEGIN; SELECT idem_once('open', store => 'written')});
	expire('written');
	$writer->query('COMMIT');
	$writer->quit;
}
fill('sealed', 0, q{now() - interval '2 days'});
expire('sealed');
fill('sealed', 1, 'clock_timestamp()');
fill('emptied', 0, q{now() - interval '2 days'});
expire('emptied') foreach 1 .. 2;
fill('emptied', 1, 'clock_timestamp()');
foreach my $i (0 .. 2)
{
	fill('turned', $i, q{now() - interval '50 minutes'});
	expire('turned');
}
fill('leased', 0, 'clock_timestamp()');
source(q{INSERT INTO leased (key, status, token, lease_until)
	VALUES ('moved', 'leased', 1, now() + interval '1 day')});
expire('leased');
fill('leased', 1, 'clock_timestamp()');
source(q{INSERT INTO leased (key, status, token, lease_until, generation)
	VALUES ('left', 'leased', 2, now() + interval '1 day', 0)});
fill('dropped', 0, 'clock_timestamp()');
expire('dropped');
source('DROP TABLE dropped');

is(states('as_made'), '{filling,empty,empty}', 'state: as made');
is(states('filling'), '{filling,empty,empty}', 'state: filling');
is(states('written'), '{full,filling,empty}', 'state: full');
is(states('sealed'), '{sealed,filling,empty}', 'state: sealed');
is(states('emptied'), '{empty,filling,empty}', 'state: emptied');
like(states('turned'), qr/^\{sealed,sealed,filling\}$/, 'state: turned');
like(states('leased'), qr/^\{(full|sealed),filling,empty\}$/, 'state: leased');
is(source(q{SELECT count(*) FROM idem_store_state
		WHERE store_name = 'dropped'}),
	'1', 'the store that was dropped has left its bookkeeping');

sub records
{
	my ($node, $database, $store) = @_;
	return run($node, $database,
		'SELECT key, status, completed_at, token, lease_until, '
		  . "md5(result::text) FROM $store ORDER BY key");
}

my %expected = map { $_ => records($old, 'source', $_) } @stores;
my $retentions = q{SELECT store::text, retention, generations FROM idem_stores
	ORDER BY store::text COLLATE "C"};
my $expected_retentions = source($retentions);

# A database that came from a dump knows what the source knew; also when the
# worker has been there, and has sealed anew what it must seal anew
sub knows
{
	my ($node, $database) = @_;

	$node->poll_query_until($database,
		q{SELECT sealed_at[1] IS NOT NULL AND origin LIKE '%/' || (
			SELECT oid FROM pg_database WHERE datname = current_database())
		FROM idem_store_state WHERE store_name = 'sealed'})
	  or die 'the worker has not sealed anything';
	foreach my $store (@stores)
	{
		is(records($node, $database, $store),
			$expected{$store}, "$database: the records of $store");
		is( run($node, $database,
				"SELECT s.key, c.claimed, c.status FROM $store s, "
				  . "idem_try_claim(s.key, store => '$store') c "
				  . 'WHERE c.claimed OR c.status <> CASE s.status '
				  . "WHEN 'leased' THEN 'in_progress' ELSE 'completed' END "
				  . 'OR c.result::text IS DISTINCT FROM s.result::text'),
			'',
			"$database: the answers of $store");
	}
	is(run($node, $database, $retentions),
		$expected_retentions, "$database: retentions");
	is( run($node, $database,
			q{SELECT status FROM idem_try_claim('long ago',
				first_sent => now() - interval '3 days', store => 'emptied')}),
		'too_late',
		"$database: what may have been emptied is too late");
	is( run($node, $database,
			q{SELECT idem_once('new', store => store::text::regclass)
			FROM idem_stores WHERE store::text = 'turned'}),
		't',
		"$database: a new key");
	is( run($node, $database,
			q{SELECT idem_create_store('dropped', '2 hours', 3);
			SELECT retention FROM idem_stores WHERE store::text = 'dropped'}),
		"public.dropped\n02:00:00",
		"$database: a store in the place of the one dropped");
	return;
}

sub restore
{
	my ($database, @options) = @_;

	$new->command_ok(
		[
			'pg_restore', '--exit-on-error',
			'-d', $new->connstr($database), @options
		],
		"$database: pg_restore without errors");
	return;
}

$old->command_ok(
	[ 'pg_dump', '-f', "$dump/plain", $old->connstr('source') ],
	'pg_dump, plain');
$old->command_ok(
	[ 'pg_dump', '-Fc', '-f', "$dump/custom", $old->connstr('source') ],
	'pg_dump, custom');
$old->command_ok(
	[
		'pg_dump', '-Fd', '-j', '3',
		'-f', "$dump/directory", $old->connstr('source')
	],
	'pg_dump, parallel');

run($new, 'postgres', "CREATE DATABASE $_")
  foreach 'plain', 'custom', 'parallel', 'sections';
$new->command_ok(
	[
		'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1',
		'-d', $new->connstr('plain'), '-f', "$dump/plain"
	],
	'plain: psql without errors');
restore('custom', "$dump/custom");
restore('parallel', '-j', '3', "$dump/directory");

# In sections; the worker comes in between, and notes what it finds
restore('sections', '--section=pre-data', "$dump/custom");
run($new, 'sections', q{INSERT INTO idem_completions (key) VALUES ('before')});
$new->poll_query_until('sections', q{SELECT filling_since IS NOT NULL
	FROM idem_store_status('idem_completions')}) or die 'no worker';
restore('sections', '--section=data', "$dump/custom");
run($new, 'sections', q{DELETE FROM idem_completions WHERE key = 'before'});
restore('sections', '--section=post-data', "$dump/custom");

knows($new, $_) foreach 'plain', 'custom', 'parallel', 'sections';

# The whole cluster
{
	my $all = PostgreSQL::Test::Cluster->new('all');
	my ($out, $err);

	$all->init;
	$all->append_conf('postgresql.conf',
		"shared_preload_libraries = 'idem'\n$conf");
	$all->start;
	$old->command_ok([ 'pg_dumpall', '-f', "$dump/all", '-d',
			$old->connstr('postgres') ], 'pg_dumpall');
	$all->psql('postgres', slurp_file("$dump/all"), stdout => \$out,
		stderr => \$err, on_error_stop => 0);
	is(join("\n", grep { /ERROR/ && !/role "\w+" already exists/ }
			split(/\n/, $err)), '', 'all: psql without errors');
	knows($all, 'source');
	is( run($all, 'source',
			q{SELECT current_setting('idem.wait_timeout'), (
				SELECT setconfig::text FROM pg_db_role_setting
				WHERE setrole = 'clerk'::regrole)}),
		'8s|{idem.wait_timeout=7s}',
		'all: settings');
	$all->stop;
}
$new->stop;

# pg_upgrade, with work that is due: nothing may be done in the middle
{
	my $upgraded = PostgreSQL::Test::Cluster->new('upgraded');
	my $bindir = $old->config_data('--bindir');
	my $notes = q{SELECT * FROM idem_store_state ORDER BY store_name};
	my ($expected_due, $expected_notes);

	source(q{SELECT idem_create_store('due', '1 second', 2);
		INSERT INTO due (key, completed_at) SELECT 'due ' || g,
			now() - interval '2 days' FROM generate_series(1, 10) g});
	expire('due');
	is(states('due'), '{sealed,filling}', 'pg_upgrade: there is work to do');
	$expected_due = records($old, 'source', 'due');
	$expected_notes = source($notes);
	$old->stop;
	$old->append_conf('postgresql.conf', "idem.worker = on\n");

	$upgraded->init;
	$upgraded->append_conf('postgresql.conf',
		"shared_preload_libraries = 'idem'\n$conf");
	chdir $dump or die $!;
	command_ok(
		[
			'pg_upgrade', '--no-sync',
			'-b', $bindir, '-B', $bindir,
			'-d', $old->data_dir, '-D', $upgraded->data_dir,
			'-s', $upgraded->host, '-p', $old->port, '-P', $upgraded->port
		],
		'pg_upgrade');
	$upgraded->append_conf('postgresql.conf', "idem.worker = off\n");
	$upgraded->start;
	is(records($upgraded, 'source', 'due'),
		$expected_due, 'pg_upgrade: nothing has expired meanwhile');
	is(run($upgraded, 'source', $notes),
		$expected_notes, 'pg_upgrade: no worker was at work meanwhile');
	$upgraded->append_conf('postgresql.conf', "idem.worker = on\n");
	$upgraded->reload;
	$upgraded->poll_query_until('source', 'SELECT count(*) = 0 FROM due')
	  or die 'never expired';
	pass('pg_upgrade: expiry goes on');
	run($upgraded, 'source', 'DROP TABLE due');
	knows($upgraded, 'source');
	$upgraded->stop;
}

done_testing();
