# PREPARE TRANSACTION: the completion waits with the transaction, over restarts
# and crashes, and so do the duplicates.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $node = idem_node('main', conf => q{
max_prepared_transactions = 10
idem.wait_timeout = -1
});

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

my $effect = 'INSERT INTO effect VALUES';

sql('CREATE TABLE effect (key text)');

# A transaction that has completed KEY, with a savepoint for good measure, and
# has given another up
sub prepare
{
	my ($session, $key) = @_;
	$session->query(
		"BEGIN; SELECT claimed FROM idem_claim('$key', '{\"a\":1}'); "
		  . "SELECT claimed FROM idem_claim('$key given up'); SAVEPOINT a; "
		  . "$effect ('$key'); SELECT idem_complete('$key', '[1.0,  2]'); "
		  . "RELEASE a; SELECT idem_release('$key given up'); "
		  . "PREPARE TRANSACTION '$key'");
	return;
}

my $one = session($node);

# The end decides; in between nothing is known and the key is not free
foreach my $end ('COMMIT', 'ROLLBACK')
{
	my @waiters = map { session($node) } 1 .. 3;

	prepare($one, $end);
	is(sql("SELECT count(*) FROM idem_lookup('$end')"),
		'0', "$end: not visible yet");
	is(sql("SELECT status FROM idem_try_claim('$end')"),
		'in_progress', "$end: in progress");
	is( sql("SELECT string_agg(status, ',') FROM "
			  . "idem_claim_batch(ARRAY['$end'], wait => '0')"),
		'in_progress',
		"$end: in progress in a batch");
	like($one->error("SELECT idem_claim('$end', wait => '1ms')"),
		qr/ID002/, "$end: the session that prepared is a stranger now");
	is($one->query("SELECT idem_release('$end')"),
		'f', "$end: it has nothing to release");
	like($one->error("SELECT idem_complete('$end', '2')"),
		qr/ID005/, "$end: it has nothing to complete");

	foreach my $waiter (@waiters)
	{
		$waiter->query('BEGIN');
		$waiter->send("SELECT claimed, result FROM idem_claim('$end')");
	}
	$_->wait_blocked foreach @waiters;
	sql("$end PREPARED '$end'");

	if ($end eq 'COMMIT')
	{
		is($_->answer, 'f|[1.0,  2]', "$end: answered with the result")
		  foreach @waiters;
		$_->query('COMMIT') foreach @waiters;
		like($one->error("SELECT idem_claim('$end', '{\"a\":2}')"),
			qr/ID001/, "$end: the fingerprint is there");
		is(sql("SELECT claimed FROM idem_try_claim('$end')"),
			'f', "$end: done");
	}
	else
	{
		my $claimed = 0;

		# One claims; as it rolls back, the next one does
		while (@waiters)
		{
			$node->poll_query_until('postgres',
				q{SELECT count(*) = 1 FROM pg_stat_activity
				WHERE state = 'idle in transaction'}) or die 'none claims';
			my $pid = sql(q{SELECT pid FROM pg_stat_activity
				WHERE state = 'idle in transaction'});
			my ($claimer) = grep { $_->pid == $pid } @waiters;
			@waiters = grep { $_->pid != $pid } @waiters;
			$claimed++ if $claimer->answer eq 't|';
			$claimer->query('ROLLBACK');
		}
		is($claimed, 3, "$end: each waiter claims in its turn");
	}
	is( sql("SELECT idem_once('$end given up')"),
		't', "$end: what was given up is free");
}
is(sql(q{SELECT count(*) FROM effect WHERE key = 'COMMIT'}),
	'1', 'effect committed');
is(sql(q{SELECT count(*) FROM effect WHERE key = 'ROLLBACK'}),
	'0', 'effect rolled back');

# Over a clean restart, and over a crash
foreach my $mode ('fast', 'immediate')
{
	my $waiter;

	prepare($one, "$mode $_") foreach 'commit', 'rollback';
	$node->stop($mode);
	$_->kill9 foreach $one;
	$node->start;
	$one = session($node);

	is(sql(q{SELECT count(*) FROM pg_prepared_xacts}), '2', "$mode: kept");
	is(sql("SELECT status FROM idem_try_claim('$mode $_')"),
		'in_progress', "$mode: $_: still in progress")
	  foreach 'commit', 'rollback';
	$waiter = session($node);
	$waiter->send("SELECT idem_once('$mode commit')");
	$waiter->wait_blocked;
	sql("COMMIT PREPARED '$mode commit'");
	is($waiter->answer, 'f', "$mode: the waiter is answered");
	$waiter->send("SELECT idem_once('$mode rollback')");
	$waiter->wait_blocked;
	sql("ROLLBACK PREPARED '$mode rollback'");
	is($waiter->answer, 't', "$mode: the waiter claims");
	is( sql("SELECT result FROM idem_claim('$mode commit')"),
		'[1.0,  2]', "$mode: replay");
	is(sql("SELECT count(*) FROM effect WHERE key LIKE '$mode%'"),
		'1', "$mode: one effect");
	$waiter->quit;
}

# Unfinished claims cannot be prepared
foreach my $unfinished (
	"SELECT claimed FROM idem_claim('unfinished')",
	"SELECT claimed FROM idem_claim('unfinished'); SAVEPOINT a; "
	. "SELECT idem_complete('unfinished'); ROLLBACK TO a",
	"SELECT claimed FROM idem_claim('unfinished'); SAVEPOINT a; "
	. "SELECT idem_release('unfinished'); ROLLBACK TO a",
	"SAVEPOINT a; SELECT claimed FROM idem_claim('unfinished'); RELEASE a")
{
	$one->query("BEGIN; $effect ('unfinished'); $unfinished");
	like($one->error(q{PREPARE TRANSACTION 'unfinished'}),
		qr/ID006/, 'an unfinished claim cannot be prepared');
	is(sql(q{SELECT (SELECT count(*) FROM pg_prepared_xacts),
		(SELECT count(*) FROM effect WHERE key = 'unfinished'),
		(SELECT status FROM idem_try_claim('not', wait => '0')),
		idem_release('not')}),
		'0|0|claimed|t', 'nothing of it is left');
	is($one->query(q{SELECT 1}), '1', 'the session goes on');
}
is(sql(q{SELECT idem_once('unfinished')}), 't', 'its key is free');

# A claim of a savepoint that was rolled back does not stand in the way
$one->query(q{BEGIN; SAVEPOINT a; SELECT claimed FROM idem_claim('undone');
	ROLLBACK TO a; PREPARE TRANSACTION 'undone'});
is(sql(q{SELECT idem_once('undone')}), 't', 'a rolled back claim is gone');
sql(q{ROLLBACK PREPARED 'undone'});

# Very many claims: made good early, prepared, committed in another session
$one->query(q{BEGIN; SELECT count(idem_complete('m' || n, n))
	FROM generate_series(1, 3000) n,
	LATERAL (SELECT FROM idem_claim('m' || n) WHERE claimed) c;
	PREPARE TRANSACTION 'many'});
is( sql(q{SELECT string_agg(DISTINCT status, ',')
		FROM generate_series(1, 3000, 7) n, idem_try_claim('m' || n)}),
	'in_progress', 'many: in progress');
$node->stop('immediate');
$one->kill9;
$node->start;
is( sql(q{SELECT string_agg(DISTINCT status, ',')
		FROM generate_series(1, 3000, 7) n, idem_try_claim('m' || n)}),
	'in_progress', 'many: still in progress after a crash');
sql(q{COMMIT PREPARED 'many'});
is( sql(q{SELECT count(*) FROM generate_series(1, 3000) n,
		idem_try_claim('m' || n) WHERE result::text = n::text}),
	'3000', 'many: replayed');

$node->stop;
done_testing();
