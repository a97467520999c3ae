# Where the counters live: over a clean restart, a crash, a file that is
# damaged or of another version; a table that is full; tables and databases
# that are dropped; standbys; and the most replayed keys against the truth.

use strict;
use warnings;

use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $node = idem_node('main', preload => 1, init => { allows_streaming => 1 }, conf => q{
idem.worker = off
idem.naptime = 1
max_connections = 40
autovacuum = off
fsync = off
max_locks_per_transaction = 512
});
my $file = $node->data_dir . '/pg_stat/idem.stat';

sub sql { return $node->safe_psql($_[1] // 'postgres', $_[0]); }
sub log_since { return slurp_file($node->logfile, $_[0]); }

sub counters
{
	return sql(q{SELECT claims, executed, suppressed FROM idem_stat
		WHERE store = 'idem_completions'::regclass});
}

# A clean restart
sql(q{SELECT idem_once('a'); SELECT idem_once('a'); SELECT idem_once('b')});
is(counters(), '3|2|1', 'counted');
$node->stop('fast');
ok(-s $file, 'a clean shutdown writes the file');
ok(!-e "$file.tmp", 'and leaves no other');
my $kept = slurp_file($file);
$node->start;
ok(!-e $file, 'it is gone once it was read');
is(counters(), '3|2|1', 'kept over a clean restart');
is(sql('SELECT started_from FROM idem_stat_status()'),
	'the last clean shutdown', 'says where they started');

# A crash
my $from = -s $node->logfile;
sql(q{SELECT idem_once('b')});
$node->stop('immediate');
$node->start;
is(counters(), '0|0|0', 'after a crash they start from zero');
like(log_since($from), qr/counters of idem start from zero/, 'and say so');
like(sql('SELECT started_from FROM idem_stat_status()'), qr/^zero: there was no clean shutdown/,
	'in the view too');

# A file that is not what it should be
my %damage = (
	'cut short' => substr($kept, 0, length($kept) - 1),
	'longer' => $kept . 'x',
	'of one bit' => substr($kept, 0, 40) . chr(ord(substr($kept, 40, 1)) ^ 1) . substr($kept, 41),
	'of another version' => substr($kept, 0, 4) . pack('L', 999) . substr($kept, 8),
	'empty' => '',
	'of too many rows' => substr($kept, 0, 12) . pack('L', 0xffffffff) . substr($kept, 16));
foreach my $what (sort keys %damage)
{
	$node->stop('fast');
	open my $f, '>:raw', $file or die $!;
	print $f $damage{$what};
	close $f;
	$from = -s $node->logfile;
	$node->start;
	my $log = log_since($from);
	is(scalar(() = $log =~ /ignoring invalid file "pg_stat\/idem.stat"/g), 1,
		"a file $what is reported once");
	is(counters(), '0|0|0', "a file $what is ignored");
}
$node->stop('fast');
open my $f, '>:raw', $file or die $!;
print $f $kept;
close $f;
$node->start;
is(counters(), '3|2|1', 'the same file undamaged is taken');

# A file that cannot be read, and one that cannot be written: the server starts
# and stops all the same, and says why there are no counters
$node->stop('fast');
chmod 0, $file or die $!;
$from = -s $node->logfile;
$node->start;
like(log_since($from), qr/could not read file "pg_stat\/idem.stat": Permission denied/,
	'a file that cannot be read');
is(counters(), '0|0|0', 'they start from zero');
my %hindrance = (
	'no such place' => sub { mkdir "$file.tmp" },
	'no space' => sub { symlink '/dev/full', "$file.tmp" });
foreach my $what (sort keys %hindrance)
{
	sql(q{SELECT idem_once('a')});
	$hindrance{$what}->() or die $!;
	$from = -s $node->logfile;
	$node->stop('fast');
	like(log_since($from), qr/could not write file "pg_stat\/idem.stat.tmp": .*database system is shut down/s,
		"a file that cannot be written: $what");
	ok(!-e $file, "$what: none is left");
	-d "$file.tmp" ? rmdir "$file.tmp" : unlink "$file.tmp";
	$node->start;
	is(counters(), '0|0|0', "$what: they start from zero");
}
sql(q{SELECT idem_stat_reset()});
is(counters(), '0|0|0', 'reset');
$node->restart;
is(counters(), '0|0|0', 'a reset is kept over a restart');

# The most replayed keys, on a skewed stream: key i about 20000 / i times
my %exact;
my $calls = '';
foreach my $i (1 .. 3000)
{
	$exact{"h$i"} = int(20000 / $i);
}
sql(q{SET synchronous_commit = off; SELECT count(idem_once('h' || i)) FROM generate_series(1, 3000) i});
my @streams;
foreach my $s (0 .. 3)
{
	my $out = '';
	push @streams, IPC::Run::start(
		[ $node->installed_command('psql'), '-XAtq', '-d', $node->connstr('postgres'), '-c',
			qq{SELECT count(idem_once('h' || i)) FROM (SELECT i, n FROM generate_series(1, 3000) i,
				generate_series(1, 20000 / i) n WHERE n % 4 = $s ORDER BY hashint8(i * 20011 + n)) x} ],
		'<', \undef, '>', \$out);
}
$_->finish foreach @streams;
my $total = 0;
$total += $_ foreach values %exact;
is(sql(q{SELECT suppressed FROM idem_stat}), $total, 'all of the stream was suppressed');
my %shown;
my ($wrong, $too_wide, $sum) = (0, 0, 0);
foreach my $line (split /\n/, sql(q{SELECT key, replays, error FROM idem_stat_keys}))
{
	my ($key, $replays, $error) = split /\|/, $line;
	$shown{$key} = 1;
	$sum += $replays;
	$wrong++ unless $replays - $error <= $exact{$key} && $exact{$key} <= $replays;
	$too_wide++ if $error > $total / 64;
}
is($wrong, 0, 'the true number is within replays - error and replays, for every key');
is($too_wide, 0, 'no error above the bound');
is($sum, $total, 'the counts add up to the stream');
is(scalar(grep { !$shown{$_} && $exact{$_} > $total / 64 / 4 } keys %exact), 0,
	'no frequent key is missing');
is( sql(q{SELECT string_agg(key, ',' ORDER BY replays DESC) FROM
		(SELECT * FROM idem_stat_keys LIMIT 10) x}),
	join(',', map { "h$_" } 1 .. 10), 'the ten most frequent, in their order');
cmp_ok(scalar(keys %shown), '<=', 1024, 'a bounded number of keys');

# A standby
$node->backup('copy');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'copy', has_streaming => 1);
$standby->start;
$node->wait_for_catchup($standby, 'replay');
foreach my $view (qw(idem_stat idem_stat_keys idem_in_flight idem_spikes idem_health idem_history))
{
	like($standby->safe_psql('postgres', "SELECT count(*) FROM $view"), qr/^\d+$/,
		"$view on a standby");
}
is( $standby->safe_psql('postgres', q{SELECT topic FROM idem_health}), 'all',
	'a standby has nothing to say about expiry');
is($standby->safe_psql('postgres', q{SELECT idem_stat_reset() IS NOT NULL}), 't', 'reset on a standby');
$standby->stop;

# More stores than there are places, over all databases
my $each = 250;
my $databases = 9;
sql('CREATE DATABASE d1');
sql('CREATE EXTENSION idem', 'd1');
sql("SELECT count(idem_create_store('s' || i, generations => 2)) FROM generate_series(1, $each) i", 'd1');
sql("CREATE DATABASE d$_ TEMPLATE d1") foreach 2 .. $databases;
sql("SELECT count(idem_once('k', store => ('s' || i)::regclass)) FROM generate_series(1, $each) i", "d$_")
  foreach 1 .. $databases;
my ($used, $overflowed) = split /\|/, sql('SELECT used, overflowed FROM idem_stat_status()');
is($used, 2048, 'the table of counters is full');
is($overflowed, $each * $databases + 1 - 2048, 'and what is not counted is');
is(sql(q{SELECT count(*) FROM idem_health WHERE topic = 'counters'}), '1', 'idem_health says so');
is(sql(q{SELECT count(*) FROM idem_stat WHERE claims = 1}, 'd1'), $each, 'those with a place are counted');

# Sessions cancelled and terminated while it is full: nothing is ever raised
# while a lock of idem's is held, or the next one would hang
sql(q{CREATE FUNCTION churn() RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		FOR n IN 1 .. 1000000 LOOP
			PERFORM idem_once('c' || n % 50, store => ('s' || 1 + n % 250)::regclass);
			PERFORM idem_stat_reset(('s' || 1 + n % 250)::regclass);
		END LOOP;
	END $$}, "d$databases");
foreach my $how ('pg_cancel_backend', 'pg_terminate_backend')
{
	for (1 .. 15)
	{
		my @sessions = map { session($node, "d$databases") } 1 .. 2;
		$_->send('SELECT churn()') foreach @sessions;
		$node->poll_query_until('postgres',
			q{SELECT count(*) >= 1 FROM pg_stat_activity WHERE query LIKE 'SELECT churn%' AND state = 'active'});
		foreach my $session (@sessions)
		{
			$node->poll_query_until('postgres', "SELECT $how(" . $session->pid
				  . ") OR NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = " . $session->pid . ')');
			$session->answer_error;
			$how eq 'pg_cancel_backend' ? $session->quit : $session->kill9;
		}
	}
	is(sql(q{SELECT idem_once('after', store => 's7')}, "d$databases"),
		$how eq 'pg_cancel_backend' ? 't' : 'f', "after $how");
}
is(sql(q{SELECT count(*) >= 0 FROM idem_stat_keys}, "d$databases"), 't', 'keys can be read');

# Dropped tables and databases give their places back
$node->append_conf('postgresql.conf', "idem.worker = on\n");
$node->reload;
sql("DROP DATABASE d$_") foreach 2 .. $databases;
sql("DO \$\$ BEGIN FOR i IN 1 .. 50 LOOP EXECUTE 'DROP TABLE s' || i; END LOOP; END \$\$", 'd1');
$node->poll_query_until('postgres',
	'SELECT used = ' . ($each - 50 + 1) . ' FROM idem_stat_status()')
  or die 'places are not given back';
pass('places are given back');
sql(q{CREATE DATABASE late});
is( sql(q{CREATE EXTENSION idem; SELECT idem_once('x'); SELECT claims FROM idem_stat}, 'late'),
	"t\n1", 'and are taken again');

# A store that is not committed yet keeps its counters
my $maker = session($node);
$maker->query(q{BEGIN; SELECT idem_create_store('fresh'); SELECT idem_once('f1', store => 'fresh')});
sql(q{DROP DATABASE late});
sql("SELECT idem_once('y', store => 's60'); DROP TABLE s60", 'd1');
$node->poll_query_until('postgres',
	'SELECT used = ' . ($each - 51 + 2) . ' FROM idem_stat_status()')
  or die 'no round of the worker';
$maker->query(q{SELECT idem_once('f1', store => 'fresh'); COMMIT});
is(sql(q{SELECT claims, executed FROM idem_stat WHERE store = 'fresh'::regclass}), '2|1',
	'counters of a store made in an open transaction');

$node->stop;
done_testing();
