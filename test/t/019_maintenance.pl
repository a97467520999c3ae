# Partitions are rewritten and indexes rebuilt while keys are claimed and
# expire: no key is lost, none is claimed again within its retention, and
# expiry goes on.
#
# Each effect is noted with its time.  Two effects of one key must be the
# retention apart: the first was noted before its commit, so that is the least
# that "at least R from commit" promises.

use strict;
use warnings;

use IPC::Run;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $clients = 3;
my $dir = PostgreSQL::Test::Utils::tempdir();
my $node = idem_node(
	'main',
	preload => 1,
	conf => q{
idem.naptime = 1
log_statement = none
deadlock_timeout = 100ms
idem.wait_timeout = 60s
log_line_prefix = '%m [%p] %b '
});

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

sql(q{
	CREATE TABLE effect (store text, key text, at timestamptz
		DEFAULT clock_timestamp());
	SELECT idem_create_store('kept', '1 hour', 3);
	SELECT idem_create_store('brief', '2 seconds', 3);
	CREATE FUNCTION job(k text, s text) RETURNS boolean LANGUAGE plpgsql AS $$
	BEGIN
		IF NOT (SELECT claimed FROM idem_claim(k, store => s::regclass)) THEN
			RETURN false;
		END IF;
		INSERT INTO effect (store, key) VALUES (s, k);
		PERFORM idem_complete(k, to_jsonb(repeat(k, 1 + length(k) * 100)),
			store => s::regclass);
		RETURN true;
	END $$});

# New keys, and old ones again, some of them many times
my @load;
foreach my $client (1 .. $clients)
{
	my $script = "\\set VERBOSITY verbose\n";

	foreach my $i (1 .. 40000)
	{
		my $key = 'k' . int($i / 3 * rand);
		my $store = $i % 2 ? 'kept' : 'brief';
		$script .= "SELECT job('$key', '$store');\n";
	}
	append_to_file("$dir/load$client.sql", $script);
	push @load,
	  IPC::Run::start(
		[
			$node->installed_command('psql'), '-XAtq',
			'-d', $node->connstr('postgres'), '-f', "$dir/load$client.sql"
		],
		'>', '/dev/null', '2>', "$dir/load$client.err");
}

sub progress
{
	my $before = sql('SELECT count(*) FROM effect');
	$node->poll_query_until('postgres',
		"SELECT count(*) > $before + 50 FROM effect")
	  or die 'no progress';
	return;
}

sub expired
{
	return sql(q{SELECT generations_expired FROM idem_store_status('brief')});
}

my $turns = expired();
my @statements = (
	'VACUUM FULL PARTITION', 'CLUSTER PARTITION USING INDEX',
	'REINDEX TABLE PARTITION', 'REINDEX TABLE CONCURRENTLY PARTITION',
	'VACUUM (FREEZE, ANALYZE) PARTITION',
	'REINDEX INDEX CONCURRENTLY INDEX');
progress();
foreach my $statement (@statements)
{
	foreach my $generation (0 .. 2)
	{
		foreach my $store ('kept', 'brief')
		{
			my $partition = "${store}_$generation";
			my $index = sql("SELECT indexrelid::regclass FROM pg_index "
				  . "WHERE indrelid = '$partition'::regclass "
				  . 'AND indisreplident');
			my $command = $statement =~ s/PARTITION/$partition/r;

			# another's REINDEX CONCURRENTLY and the worker's locks can meet
			$command =~ s/\bINDEX$/$index/;
			my ($rc, $out, $err) = $node->psql('postgres',
				"\\set VERBOSITY verbose\n$command");
			fail("$command: $err") if $err =~ /ERROR:  (?!40P01)/;
		}
	}
	progress();
	pass("claims go on: $statement");
}
$node->poll_query_until('postgres',
	"SELECT generations_expired > $turns + 2 FROM idem_store_status('brief')")
  or die 'expiry does not go on';
pass('expiry goes on');

# pg_repack: a log trigger, a copy, and a swap of the files
SKIP:
{
	my $program = $node->config_data('--bindir') . '/pg_repack';

	skip 'pg_repack is not there', 4 unless -x $program;
	sql('CREATE EXTENSION pg_repack');
	foreach my $partition ('kept_0', 'kept_1', 'brief_0', 'brief_1')
	{
		$node->command_ok(
			[
				$program, '--no-kill-backend', '--wait-timeout=60',
				'-t', "public.$partition", '-d', 'postgres'
			],
			"pg_repack of $partition");
		progress();
	}
}

# Whatever was in the way, the load goes on and the ring turns
$turns = expired();
$node->poll_query_until('postgres',
	"SELECT generations_expired > $turns + 2 FROM idem_store_status('brief')")
  or die 'expiry does not go on';
pass('expiry goes on afterwards');

my %states;
foreach my $client (1 .. $clients)
{
	$load[ $client - 1 ]->kill_kill(grace => 0);
	my $errors = slurp_file("$dir/load$client.err");
	$states{$1}++ while $errors =~ /(?:ERROR|FATAL|PANIC):  (\w{5}):/g;
	note($1) while $errors =~ /(.*(?:ERROR|FATAL|PANIC):  (?!40).*)/g;
}
$node->poll_query_until('postgres',
	q{SELECT count(*) = 1 FROM pg_stat_activity
	WHERE backend_type = 'client backend'}) or die 'clients stay';
like(join(' ', sort keys %states), qr/^((40001|40P01) ?)*$/,
	'no unexpected error');

note(sql(q{SELECT store, count(*), count(DISTINCT key) FROM effect
	GROUP BY 1 ORDER BY 1}));
is( sql(q{SELECT count(*) FROM (SELECT FROM effect WHERE store = 'kept'
		GROUP BY key HAVING count(*) > 1) x}),
	'0',
	'kept: each effect is there once');
is( sql(q{SELECT count(*) FROM (SELECT key FROM effect WHERE store = 'kept') e
		FULL JOIN kept c USING (key)
		WHERE e IS NULL OR c IS NULL
		OR c.result::text <> to_json(repeat(key, 1 + length(key) * 100))::text}),
	'0',
	'kept: effects and records agree');
is( sql(q{SELECT count(*) FROM (SELECT at - lag(at) OVER
			(PARTITION BY key ORDER BY at) AS apart
			FROM effect WHERE store = 'brief') x
		WHERE apart < interval '2 seconds'}),
	'0',
	'brief: no key is claimed again too early');
cmp_ok(sql(q{SELECT count(*) FROM (SELECT FROM effect WHERE store = 'brief'
		GROUP BY key HAVING count(*) > 1) x}),
	'>', 0, 'brief: keys are claimed again later');
is( sql(q{SELECT count(*) FROM effect e
		WHERE store = 'brief' AND at > (SELECT max(at) FROM effect) -
			interval '1 second'
		AND at > clock_timestamp() - interval '1.5 seconds'
		AND NOT EXISTS (SELECT FROM brief WHERE key = e.key)}),
	'0',
	'brief: what is young is there');
is(sql('SELECT count(*) FROM idem_stores WHERE trouble IS NOT NULL'),
	'0', 'no trouble is noted');
unlike(slurp_file($node->logfile), qr/PANIC|TRAP|terminated by signal/,
	'nothing has crashed');

$node->stop;
done_testing();
