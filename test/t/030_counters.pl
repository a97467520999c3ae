# Counters against the truth: what eight clients were told and what became of
# their transactions, with rollbacks, savepoints, batches, prepared
# transactions, refused commits and terminated sessions; then every counter
# once more on its own, waits, and who sees what.

use strict;
use warnings;

use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $clients = 8;
my $rounds = 4;
my $transactions = 40;
my $node = idem_node('main', preload => 1, conf => q{
max_prepared_transactions = 50
idem.worker = off
autovacuum = off
});
my $dir = PostgreSQL::Test::Utils::tempdir();

sub sql { return $node->safe_psql('postgres', $_[0]); }

# A small number of keys, so that they meet; the same every time
my $seed = 1;

sub random
{
	my ($n) = @_;
	$seed = ($seed * 1103515245 + 12345) % 2147483648;
	return int($seed / 65536) % $n;
}

# One key of many that clients meet on
sub key { return 'k' . random(300); }

# Claims a key and completes it if it is ours; "ans" lines are the ledger
sub claim
{
	my ($key, $where, $complete) = @_;
	my $then = $complete ? "SELECT idem_complete('$key', '1') AS x \\gset\n" : '';

	return "\\set c f\n\\set s error\n"
	  . "SELECT claimed AS c, status AS s FROM idem_try_claim('$key', wait => '20 s') \\gset\n"
	  . "\\echo ans $where :s\n\\if :c\n$then\\endif\n";
}

my @kinds = (
	[ commit => sub { claim(key(), 'main', 1) . 'COMMIT' } ],
	[ twice => sub { my $k = key();
			claim($k, 'main', 1) . claim($k, 'main', 0) . 'COMMIT' } ],
	[ rollback => sub { claim(key(), 'main', random(2)) . 'ROLLBACK' } ],
	[ savepoint => sub {
			claim(key(), 'main', 1) . "SAVEPOINT s;\n" . claim(key(), 'undone', random(2))
			  . "ROLLBACK TO s;\n" . claim(key(), 'main', 1) . 'COMMIT' } ],
	[ subcommit => sub {
			"SAVEPOINT s;\nSAVEPOINT t;\n" . claim(key(), 'main', 1)
			  . "RELEASE t;\nRELEASE s;\nCOMMIT" } ],
	[ subsub => sub {
			"SAVEPOINT s;\nSAVEPOINT t;\n" . claim(key(), 'undone', 1)
			  . "RELEASE t;\nROLLBACK TO s;\nCOMMIT" } ],
	[ prepare => sub { my $p = "p$seed";
			claim(key(), 'main', 1) . "PREPARE TRANSACTION '$p';\nCOMMIT PREPARED '$p'" } ],
	[ unfinished => sub { claim(key(), 'main', 0) . 'COMMIT' } ],
	[ release => sub { my $k = key();
			claim($k, 'main', 0) . "SELECT idem_release('$k') AS x \\gset\nCOMMIT" } ],
	[ fail => sub { claim(key(), 'main', 1) . "SELECT 1/0;\nCOMMIT" } ],
	[ batch => sub {
			my $keys = join ',', map { "'" . key() . "'" } 1 .. 6;
			"WITH b AS MATERIALIZED (SELECT * FROM idem_claim_batch(ARRAY[$keys], wait => '20 s'))"
			  . " SELECT 'ans main ' || status, CASE WHEN claimed THEN idem_complete(key, '1') END"
			  . " FROM b;\nCOMMIT" } ]);

# A client's script: its last transaction does not get to its end
sub script
{
	my $text = "\\set VERBOSITY verbose\n";

	for my $i (1 .. $transactions)
	{
		my $kind = $kinds[ random(scalar @kinds) ];
		$text .= "\\echo txn $kind->[0]\nBEGIN;\n" . $kind->[1]->() . ";\n";
	}
	return $text . "\\echo txn terminated\nBEGIN;\n" . claim('t' . $seed, 'main', 1)
	  . "SELECT pg_terminate_backend(pg_backend_pid());\n";
}

my %ledger = map { $_ => 0 }
  qw(claims executed suppressed in_progress unfinished released rolled_back);
my %kinds_seen;

# What one transaction has come to
sub account
{
	my ($kind, $ended, @answers) = @_;

	$kinds_seen{$kind}++;
	foreach my $answer (@answers)
	{
		my ($where, $status) = @$answer;
		next if $status eq 'held' or $status eq 'error';
		$ledger{claims}++;
		if ($status eq 'completed') { $ledger{suppressed}++; }
		elsif ($status eq 'in_progress') { $ledger{in_progress}++; }
		elsif ($status ne 'claimed') { die "unexpected: $status"; }
		elsif ($where eq 'undone') { $ledger{rolled_back}++; }
		elsif ($ended eq 'COMMIT' or $ended eq 'PREPARE TRANSACTION')
		{
			$ledger{ $kind eq 'release' ? 'released' : 'executed' }++;
		}
		elsif ($ended eq '' and $kind eq 'unfinished') { $ledger{unfinished}++; }
		else { $ledger{rolled_back}++; }
	}
	return;
}

for my $round (1 .. $rounds)
{
	my @running;

	for my $client (1 .. $clients)
	{
		my $file = "$dir/script-$client.sql";
		my $out = '';
		my $err = '';

		open my $f, '>', $file or die $!;
		print $f script();
		close $f;
		push @running,
		  [ IPC::Run::start(
				[ $node->installed_command('psql'), '-XAt', '-F', ' ',
					'-d', $node->connstr('postgres'), '-f', $file ],
				'<', \undef, '>', \$out, '2>', \$err),
			\$out, \$err ];
	}
	foreach my $one (@running)
	{
		my ($psql, $out, $err) = @$one;
		my ($kind, $ended, @answers);

		$psql->finish;
		like($$err, qr/57P01/, 'a client was terminated') if $round == 1;
		foreach my $line (split /\n/, $$out)
		{
			if ($line =~ /^txn (\w+)/)
			{
				account($kind, $ended, @answers) if defined $kind;
				($kind, $ended, @answers) = ($1, '');
			}
			elsif ($line =~ /^ans (\w+) (\w+)/) { push @answers, [ $1, $2 ]; }
			elsif ($line =~ /^(COMMIT|PREPARE TRANSACTION|ROLLBACK)$/
				and $ended eq ''
				and not($1 eq 'ROLLBACK' and $kind =~ /^(savepoint|subsub)$/
					and not grep { $_->[1] eq 'error' } @answers))
			{
				$ended = $1;
			}
		}
		account($kind, $ended, @answers);
	}
}
$node->poll_query_until('postgres',
	q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'client backend'})
  or die 'sessions stay';

foreach my $counter (sort keys %ledger)
{
	is(sql("SELECT $counter FROM idem_stat"), $ledger{$counter},
		"$counter equals the ledger");
}
cmp_ok($ledger{$_}, '>', 0, "the workload had $_")
  foreach qw(executed suppressed unfinished released rolled_back);
is(scalar(keys %kinds_seen), @kinds + 1, 'all kinds of transactions were there');
is(sql(q{SELECT count(*) FROM idem_completions}), $ledger{executed},
	'as many completions as executed operations');
is( sql(q{SELECT suppression_ratio = round(suppressed::numeric / (suppressed + executed), 4)
		FROM idem_stat}),
	't', 'suppression ratio');
is(sql(q{SELECT count(*) FROM idem_in_flight}), '0', 'nothing is left in flight');

# Each answer on its own, in a store of its own
sql(q{SELECT idem_create_store('s')});

sub counted
{
	my ($counters, $expected, $what) = @_;
	is(sql("SELECT $counters FROM idem_stat WHERE store = 's'::regclass"),
		$expected, $what);
	return;
}

sub fails { $node->psql('postgres', $_[0], on_error_stop => 1); return; }

counted('claims, suppression_ratio, stats_reset', '0||', 'a store that nobody used');
sql(q{SELECT idem_once('a', '{"x": 1}', 's'); SELECT idem_once('a', '{"x": 1}', 's')});
counted('claims, executed, suppressed, suppression_ratio', '2|1|1|0.5000', 'once');
fails(q{SELECT idem_once('a', '{"x": 2}', 's')});
sql(q{SELECT idem_try_claim('a', '{"x": 3}', store => 's')});
counted('claims, key_reused', '4|2', 'key_reused, raised and answered');
sql(q{SELECT idem_try_claim('b', first_sent => now() - interval '60 days', store => 's')});
counted('claims, too_late', '5|1', 'too_late');
fails(q{SELECT idem_claim('c', store => 's')});
counted('claims, unfinished, rolled_back', '6|1|0', 'unfinished');
sql(q{SELECT idem_lease('l', lease => '1 ms', store => 's')});
fails(q{SELECT idem_lease('l', store => 's')});
sql(q{SELECT idem_try_claim('l', store => 's')});
counted('claims, leases, uncertain, retried', '9|1|2|0', 'uncertain');
sql(q{SELECT idem_lease('l', lease => '1 ms', on_uncertain => 'retry', store => 's')});
counted('claims, leases, retried', '10|2|1', 'retried');
sql(q{SELECT idem_resolve('l', true, '1', 's')});
counted('resolved, executed', '1|1', 'resolved');
sql(q{SELECT idem_lease('m', lease => '1 ms', store => 's')});
sql(q{SELECT idem_lease('m', on_uncertain => 'skip', store => 's')});
sql(q{SELECT idem_try_claim('m', store => 's')});
counted('claims, leases, skipped', '13|3|2', 'skipped');
sql(q{SELECT idem_lease('n', store => 's');
	SELECT idem_lease('o', store => 's')});
sql(q{SELECT idem_complete('n', '1', token, 's') FROM idem_lookup('n', 's');
	SELECT idem_release('o', token, 's') FROM idem_lookup('o', 's')});
counted('claims, leases, executed, released', '15|5|2|1', 'leases completed and released');
sql(q{BEGIN; SELECT idem_lease('p', store => 's'); ROLLBACK});
counted('claims, leases, rolled_back', '16|5|1', 'a lease rolled back');
sql(q{BEGIN; SELECT idem_complete('q', '1', store => 's')
	FROM idem_claim('q', store => 's'); SELECT idem_forget('q', 's'); COMMIT});
counted('claims, executed', '17|3', 'done, and forgotten at once');
sql(q{SET idem.track = off; SELECT idem_once('u', store => 's');
	SELECT idem_once('u', store => 's')});
sql(q{BEGIN; SET LOCAL idem.track = off; SELECT idem_claim('v', store => 's');
	SET LOCAL idem.track = on; SELECT idem_complete('v', '1', store => 's'); COMMIT});
counted('claims, executed, suppressed', '17|3|1', 'idem.track = off counts nothing');

# Waits, and who is in flight
my $one = session($node);
my $two = session($node);
my $three = session($node);
$one->query(q{BEGIN; SET application_name = 'first';
	SELECT idem_claim('w', store => 's');
	SELECT idem_claim('w' || g, store => 's') FROM generate_series(2, 6) g});
$two->send(q{SELECT idem_once('w', store => 's')});
$two->wait_blocked;
$three->send(q{SELECT idem_claim('w', wait => '200 ms', store => 's')});
like($three->answer_error, qr/ID002/, 'a wait that ran out');
is( sql(qq{SELECT key, usename = current_user, application, store, others, waiting_pids
		FROM idem_in_flight ORDER BY key}),
	join("\n", map { "$_|t|first|s|2|{" . $two->pid . '}' } qw(w w2 w3 w4)),
	'claims in flight, and who waits');
sql(q{SELECT pg_sleep(0.05)});
$one->query(q{SELECT idem_complete('w', '1', store => 's');
	SELECT idem_release('w' || g, store => 's') FROM generate_series(2, 6) g; COMMIT});
is($two->answer, 'f', 'the waiter is answered');
counted('waits, in_progress, wait_ms >= 50, wait_ms_max between 50 and wait_ms',
	'2|1|t|t', 'waits');
is(sql(q{SELECT count(*) FROM idem_in_flight}), '0', 'and gone');

$one->query(q{BEGIN; SELECT idem_claim('x1', store => 's'); SAVEPOINT s;
	SELECT idem_claim('x2', store => 's')});
is(sql(q{SELECT string_agg(key, ',' ORDER BY key) FROM idem_in_flight}), 'x1,x2', 'two');
$one->query(q{ROLLBACK TO s});
is(sql(q{SELECT string_agg(key, ',' ORDER BY key) FROM idem_in_flight}), 'x1',
	'a savepoint took one back');
$one->kill9;
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM idem_in_flight})
  or die 'still in flight';

# Who sees what
sql(q{CREATE ROLE alice LOGIN; CREATE ROLE bob LOGIN; CREATE ROLE monitor LOGIN;
	GRANT pg_monitor TO monitor;
	GRANT SELECT, INSERT ON s TO alice, bob});
my $alice = IPC::Run::start(
	[ $node->installed_command('psql'), '-XAtq', '-d', $node->connstr('postgres'),
		'-U', 'alice', '-c', q{SELECT idem_once('mine', store => 's');},
		'-c', q{SELECT idem_once('mine', store => 's');} ], '<', \undef, '>', \my $unused);
$alice->finish;
my $holder = session($node);
$holder->query(q{SET SESSION AUTHORIZATION alice; BEGIN; SELECT idem_claim('held', store => 's')});
my %sees = (alice => 'mine|alice', monitor => 'mine|alice', bob => '<insufficient privilege>|');
my %holds = (alice => 'held|alice', monitor => 'held|alice', bob => '<insufficient privilege>|');
foreach my $role (sort keys %sees)
{
	is( sql(qq{SET ROLE $role; SELECT key, usename FROM idem_stat_keys
			WHERE store = 's'::regclass AND replays = 1 AND (usename IS NULL OR usename = 'alice')
			AND (key IN ('mine') OR '$role' = 'bob') LIMIT 1}),
		$sees{$role}, "$role and keys of alice in idem_stat_keys");
	is(sql(qq{SET ROLE $role; SELECT key, usename FROM idem_in_flight}),
		$holds{$role}, "$role and keys of alice in idem_in_flight");
	is(sql(qq{SET ROLE $role; SELECT count(*) > 0 FROM idem_stat; SELECT count(*) FROM idem_history;
			SELECT count(*) FROM idem_spikes; SELECT count(*) > 0 FROM idem_health}),
		"t\n0\n0\nt", "$role and the other views");
	like(($node->psql('postgres', qq{SET ROLE $role; SELECT idem_stat_reset('s')}))[2],
		qr/must be owner of store public\.s/, "$role cannot reset");
}
$holder->query('ROLLBACK');
sql(q{ALTER TABLE s OWNER TO bob});
is(sql(q{SET ROLE bob; SELECT idem_stat_reset('s') <= clock_timestamp()}), 't', 'the owner can reset');
counted('claims, executed, waits, wait_ms_max, stats_reset > now() - interval \'1 hour\'',
	'0|0|0|0|t', 'after a reset');
is(sql(q{SELECT count(*) FROM idem_stat_keys WHERE store = 's'::regclass}), '0', 'no keys either');
cmp_ok(sql(q{SELECT claims FROM idem_stat WHERE store = 'idem_completions'::regclass}), '==',
	$ledger{claims}, 'the other store goes on');

$node->stop;

# Without preload
$node->append_conf('postgresql.conf', "shared_preload_libraries = ''\n");
$node->start;
foreach my $view ('idem_stat', 'idem_stat_keys', 'idem_in_flight')
{
	like(($node->psql('postgres', "SELECT * FROM $view"))[2],
		qr/statistics of idem must be loaded via shared_preload_libraries.*HINT/s,
		"$view without preload");
}
is(sql(q{SELECT topic FROM idem_health WHERE topic = 'statistics'}), 'statistics',
	'idem_health says so without preload');
is(sql(q{SELECT idem_once('without'), idem_once('without')}), 't|f', 'claims do without');
$node->stop;

done_testing();
