# Real Prometheus, real exporter: what they scrape is what the workload did;
# every panel of the dashboard shows something; each alert fires for its cause
# and is quiet otherwise.

use strict;
use warnings;

use HTTP::Tiny;
use IPC::Run;
use JSON::PP;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

use Idem;

foreach my $program (qw(prometheus promtool prometheus-postgres-exporter))
{
	plan skip_all => "no $program here"
	  unless grep { -x "$_/$program" } split /:/, $ENV{PATH};
}

my $share = "$ENV{TESTDIR}/src/monitoring";
my $dir = PostgreSQL::Test::Utils::tempdir();

sub spew
{
	my ($file, $text) = @_;
	open my $f, '>', $file or die $!;
	print $f $text;
	close $f;
	return;
}

sub run_ok
{
	my ($what, @command) = @_;
	my $rc = IPC::Run::run(\@command, '<', \undef, '>', \my $out, '2>&1');
	ok($rc, $what) or diag($out);
	return;
}

# Rules, and what becomes of them.  Series are a value a minute.
run_ok('promtool check rules', 'promtool', 'check', 'rules', "$share/idem-alerts.yaml");

my $seed = 7;

sub noise
{
	my ($n, $level) = @_;
	my $total = 0;
	my @values;

	for (1 .. $n)
	{
		$seed = ($seed * 1103515245 + 12345) % 2147483648;
		$total += $level + int($seed / 65536) % ($level + 1) - int($level / 2);
		push @values, $total;
	}
	return @values;
}

sub then { my ($each, $n, @values) = @_; push @values, $values[-1] + $each for 1 .. $n; return @values; }

my @tests;

sub rule_test
{
	my ($alert, $series, $values, $minute, $fires) = @_;
	my $labels = $series =~ /^\w+(\{.*\})$/ ? $1 : '';

	push @tests, { name => "$alert at $minute", interval => '1m',
		input_series => [ { series => $series, values => join(' ', @$values) } ],
		promql_expr_test => [ {
				expr => qq{count(ALERTS{alertname="$alert",alertstate="firing"}) or vector(0)},
				eval_time => "${minute}m",
				exp_samples => [ { labels => '{}', value => $fires } ] } ] };
	return;
}

my $s = 'idem_suppressed_total{instance="a",datname="d",store="s"}';
rule_test('IdemSuppressionSpike', $s, [ noise(300, 100) ], $_, 0) foreach 5, 90, 200, 299;
rule_test('IdemSuppressionSpike', $s, [ noise(300, 4) ], $_, 0) foreach 5, 90, 200, 299;
rule_test('IdemSuppressionSpike', $s, [ then(1000, 30, noise(200, 100)) ], $_->[0], $_->[1])
  foreach [ 190, 0 ], [ 210, 1 ];
rule_test('IdemSuppressionSpike', $s, [ then(60, 30, noise(200, 1)) ], 210, 1);
rule_test('IdemSuppressionSpike', $s, [ then(0, 60, then(60, 10, noise(200, 1))) ], 240, 0);
rule_test('IdemSuppressionSpike', $s, [ then(1000, 50, 0) ], 45, 0);
rule_test('IdemExpiryOverdue', 'idem_store_expiry_overdue_seconds{store="s"}',
	[ map { $_ * 60 } 0 .. 100 ], $_->[0], $_->[1]) foreach [ 60, 0 ], [ 80, 1 ];
rule_test('IdemWorkerDown', 'idem_server_worker_up{instance="a"}',
	[ (1) x 20, (0) x 20 ], $_->[0], $_->[1]) foreach [ 19, 0 ], [ 25, 0 ], [ 35, 1 ];
rule_test('IdemUncertainLease', 'idem_lease_awaiting_decision_oldest_seconds{store="s"}',
	[ map { $_ * 60 } 0 .. 30 ], $_->[0], $_->[1]) foreach [ 15, 0 ], [ 16, 1 ];
rule_test('IdemLongWait', 'idem_session_longest_wait_seconds{datname="d"}',
	[ 1, 25, 31, 2, 40, 100, 160 ], $_->[0], $_->[1]) foreach [ 3, 0 ], [ 6, 1 ];
rule_test('IdemUncounted', 'idem_server_uncounted_total{instance="a"}',
	[ (0) x 20, (5) x 40 ], $_->[0], $_->[1]) foreach [ 19, 0 ], [ 25, 1 ], [ 50, 0 ];
spew("$dir/alerts.yaml", slurp_file("$share/idem-alerts.yaml"));
spew("$dir/tests.yaml", JSON::PP->new->canonical->encode(
	{ rule_files => ["$dir/alerts.yaml"], evaluation_interval => '1m', tests => \@tests }));
run_ok('promtool test rules', 'promtool', 'test', 'rules', "$dir/tests.yaml");
my %tested = map { $_->{name} =~ /^(\w+)/ ? ($1 => 1) : () } @tests;
is_deeply([ sort keys %tested ],
	[ sort(slurp_file("$share/idem-alerts.yaml") =~ /alert: (\w+)/g) ], 'each alert is tested');

# A server, an exporter, a Prometheus
my $node = idem_node('main', preload => 1, conf => "idem.naptime = 1\n");
sub sql { return $node->safe_psql('postgres', $_[0]); }
sql(q{CREATE ROLE monitor LOGIN; GRANT pg_monitor TO monitor; SELECT idem_create_store('other')});

my ($exporter_port, $prometheus_port) =
  (PostgreSQL::Test::Cluster::get_free_port(), PostgreSQL::Test::Cluster::get_free_port());
spew("$dir/prometheus.yaml", JSON::PP->new->encode({
	global => { scrape_interval => '1s', evaluation_interval => '1s' },
	rule_files => ["$dir/alerts.yaml"],
	scrape_configs => [ { job_name => 'idem',
			static_configs => [ { targets => ["127.0.0.1:$exporter_port"] } ] } ] }));
my @services;
my %log;
{
	local $ENV{DATA_SOURCE_NAME} = 'host=' . $node->host . ' port=' . $node->port
	  . ' user=monitor dbname=postgres sslmode=disable';
	push @services, IPC::Run::start(
		[ 'prometheus-postgres-exporter', "--web.listen-address=127.0.0.1:$exporter_port",
			'--disable-default-metrics', '--disable-settings-metrics',
			"--extend.query-path=$share/idem-queries.yaml" ],
		'<', \undef, '>', "$dir/exporter.log", '2>&1');
}
push @services, IPC::Run::start(
	[ 'prometheus', "--web.listen-address=127.0.0.1:$prometheus_port",
		"--config.file=$dir/prometheus.yaml", "--storage.tsdb.path=$dir/tsdb" ],
	'<', \undef, '>', "$dir/prometheus.log", '2>&1');

END
{
	my $rc = $?;
	foreach my $service (@services)
	{
		$service->signal('TERM');
		$service->finish;
	}
	$? = $rc;
}

my $http = HTTP::Tiny->new(timeout => 10);

# The samples of an instant query: label values joined => value
sub query
{
	my ($expr) = @_;
	my $answer = $http->post_form("http://127.0.0.1:$prometheus_port/api/v1/query", { query => $expr });

	return if $answer->{status} == 599;    # not there yet
	die "$expr: $answer->{content}" unless $answer->{success} || $answer->{status} == 503;
	return unless $answer->{success};
	return @{ JSON::PP::decode_json($answer->{content})->{data}{result} };
}

sub value { my @samples = query($_[0]); return @samples ? $samples[0]{value}[1] : undef; }

sub await
{
	my ($test, $what) = @_;
	for (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		return if $test->();
		usleep(100_000);
	}
	die "never: $what\n" . slurp_file("$dir/exporter.log") . slurp_file("$dir/prometheus.log");
}

await(sub { defined value('idem_claims_total') }, 'a scrape');

# A workload that is scraped while it runs
my ($operations, $duplicates, $undone) = (400, 700, 150);
sql(qq{DO \$\$ BEGIN
	FOR i IN 1 .. $operations LOOP PERFORM idem_once('op' || i); COMMIT; END LOOP;
	FOR i IN 1 .. $duplicates LOOP PERFORM idem_once('op' || 1 + i % $operations); COMMIT; END LOOP;
	FOR i IN 1 .. $undone LOOP PERFORM idem_claim('un' || i); ROLLBACK; END LOOP;
	FOR i IN 1 .. 7 LOOP PERFORM idem_once('o' || i, store => 'other'); COMMIT; END LOOP;
END \$\$});
my $holder = session($node);
my $waiter = session($node);
$holder->query(q{BEGIN; SELECT idem_claim('w')});
$waiter->send(q{SELECT idem_once('w')});
$waiter->wait_blocked;
await(sub { (value('idem_session_waiting') // 0) == 1 }, 'a waiter in a scrape');
$holder->query(q{SELECT idem_complete('w'); COMMIT});
$waiter->answer;
my $end = time + 1;
await(sub { (value('timestamp(idem_claims_total)') // 0) > $end }, 'a scrape after the end');

my %expected = (claims => $operations + $duplicates + $undone + 2, executed => $operations + 1,
	suppressed => $duplicates + 1, rolled_back => $undone, waits => 1, unfinished => 0);
foreach my $counter (sort keys %expected)
{
	is(value(qq{idem_${counter}_total{store="idem_completions",datname="postgres"}}), $expected{$counter},
		"scraped: $counter");
}
is(value('idem_executed_total{store="other"}'), 7, 'scraped: another store');
cmp_ok(value('idem_wait_seconds_total{store="idem_completions"}'), '>', 0, 'scraped: time waited');
is(value('idem_server_worker_up'), 1, 'scraped: the worker');
is(value('up{job="idem"}'), 1, 'the exporter is up');

# Names as Prometheus wants them
my $metrics = $http->get("http://127.0.0.1:$exporter_port/metrics")->{content};
my $ours = join "\n", (grep { /^(# (HELP|TYPE) )?idem_/ } split /\n/, $metrics), '';
{
	my $rc = IPC::Run::run([ 'promtool', 'check', 'metrics' ], '<', \$ours, '>', \my $out, '2>&1');
	ok($rc, 'promtool check metrics') or diag($out);
}
unlike($metrics, qr/pg_exporter_user_queries_load_error\{.*\} 1/, 'the exporter took all queries');
like($metrics, qr/^pg_exporter_last_scrape_error 0$/m, 'and they all ran');

# Every query of the dashboard
my $dashboard = JSON::PP::decode_json(slurp_file("$share/idem-dashboard.json"));
my $queries = 0;
foreach my $panel (@{ $dashboard->{panels} })
{
	foreach my $target (@{ $panel->{targets} })
	{
		my $expr = $target->{expr};
		$expr =~ s/\$(datname|store)\b/.*/g;
		$expr =~ s/\$__rate_interval/1m/g;
		unlike($expr, qr/\$/, 'no other variable');
		cmp_ok(scalar(my @samples = query($expr)), '>', 0, "$panel->{title}: $target->{legendFormat}");
		$queries++;
	}
}
cmp_ok($queries, '>=', 20, 'the dashboard has queries');

$node->stop;
done_testing();
