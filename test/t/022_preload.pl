# idem in shared_preload_libraries, beside other libraries, and CREATE
# EXTENSION under way: the launcher finds out, however it is committed.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init;
$node->append_conf('postgresql.conf', q{
max_prepared_transactions = 5
idem.naptime = 1
log_statement = none
});

sub sql
{
	my ($sql, $database) = @_;
	return $node->safe_psql($database // 'postgres', $sql);
}

# With a retention of 1 second, expiry does something at its first visit
my $install = q{CREATE EXTENSION idem; SELECT idem_set_retention('1 second');
	INSERT INTO idem_completions (key) VALUES ('k')};

sub await_visit
{
	my ($database) = @_;
	return $node->poll_query_until($database,
		'SELECT last_expiry IS NOT NULL FROM idem_stores');
}

# Each library has its shared memory, whichever of them came first
foreach my $libraries ('pg_stat_statements, idem', 'idem, pg_stat_statements')
{
	my $database = $libraries =~ /^idem/ ? 'idem_first' : 'idem_last';

	$node->append_conf('postgresql.conf',
		"shared_preload_libraries = '$libraries'\n");
	$node->start;
	sql("CREATE DATABASE $database");
	sql("CREATE EXTENSION pg_stat_statements; $install", $database);
	is(sql('SELECT count(*) > 0 FROM pg_stat_statements', $database),
		't', "$libraries: the other library works");
	is(sql('SELECT worker FROM idem_stores', $database),
		'running', "$libraries: there is a launcher");
	ok(await_visit($database), "$libraries: a worker comes");
	$node->stop;
}

# Neither commit nor rollback in two phases confuses anybody
$node->start;
sql('CREATE DATABASE prepared');
sql(qq{BEGIN; $install; PREPARE TRANSACTION 'install'}, 'prepared');
is(sql('SELECT count(*) FROM pg_extension WHERE extname = \'idem\'', 'prepared'),
	'0', 'prepared: not there yet');
sql(q{COMMIT PREPARED 'install'}, 'prepared');
ok(await_visit('prepared'), 'prepared and committed: a worker comes');

sql('CREATE DATABASE undone');
sql(qq{BEGIN; $install; PREPARE TRANSACTION 'install'}, 'undone');
sql(q{ROLLBACK PREPARED 'install'}, 'undone');
sql(qq{BEGIN; $install; ROLLBACK}, 'undone');
is( sql(q{SELECT to_regclass('idem_completions') IS NULL}, 'undone'),
	't', 'rolled back: nothing is left');
sql($install, 'undone');
ok(await_visit('undone'), 'and then committed: a worker comes');

# Without the library in every process, no worker; and it says so
$node->append_conf('postgresql.conf', "shared_preload_libraries = ''\n");
$node->restart;
is( sql('SELECT worker FROM idem_stores', 'undone'),
	'none: idem is not in shared_preload_libraries', 'no worker, and why');
my ($ret, $out, $err) = $node->psql('postgres', $install);
is($ret, 0, 'CREATE EXTENSION without preload');
like($err, qr/NOTICE:  idem is not in "shared_preload_libraries"/, 'and its notice');
($ret, $out, $err) = $node->psql('undone', 'SELECT count(*) FROM idem_lookup(\'k\')');
is("$out$err", '1', 'claims go on');

$node->stop;
done_testing();
