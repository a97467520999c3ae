# Two keys with one lock: strangers wait for each other, and nothing else
# happens.
#
# A build of idem with assertions has the setting idem.debug_lock_collisions,
# which gives all keys one lock; test/check runs this with such a build.  On
# another build the collisions are real ones only, which means none: then the
# schedules are run all the same, without what says that strangers wait.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $node = idem_node('main', conf => q{
log_statement = none
max_prepared_transactions = 5
deadlock_timeout = 100ms
});

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

my $collide = sql(q{SELECT idem_key('load'); SELECT count(*) FROM pg_settings
	WHERE name = 'idem.debug_lock_collisions'}) eq "load\n1";
my $stranger = $collide ? 'in_progress' : 'claimed';

if ($collide)
{
	$node->append_conf('postgresql.conf',
		"session_preload_libraries = 'idem'\n"
		  . "idem.debug_lock_collisions = on\n");
	$node->restart;
	is(sql('SHOW idem.debug_lock_collisions'), 'on', 'all keys share one lock');
}
else
{
	diag('idem was built without assertions: keys cannot be made to collide');
}

sql(q{CREATE TABLE effect (key text); SELECT idem_create_store('other');
	CREATE FUNCTION job(k text, s regclass = 'idem_completions') RETURNS boolean
	LANGUAGE plpgsql AS $$
	BEGIN
		IF NOT (SELECT claimed FROM idem_claim(k, store => s)) THEN
			RETURN false;
		END IF;
		INSERT INTO effect VALUES (k);
		PERFORM idem_complete(k, to_jsonb(k), store => s);
		RETURN true;
	END $$;
	SELECT idem_once('done')});

# What a session of its own is told of a key, at once; it changes nothing
sub status_of
{
	my ($key, $store) = @_;
	$store //= 'idem_completions';
	return sql("BEGIN; SELECT status FROM idem_try_claim('$key', "
		  . "store => '$store'); ROLLBACK");
}

my $one = session($node);
my $two = session($node);

# In one transaction
is( $one->query(q{BEGIN; SELECT claimed FROM idem_claim('a'), idem_claim('b')
		AS b(claimed_b, s, r, c, t, l, p) WHERE claimed_b;
		SELECT status FROM idem_claim('a');
		SELECT claimed FROM idem_claim('a', store => 'other')}),
	"t\nheld\nt", 'one transaction claims several keys');
is(status_of('a'), 'in_progress', 'another waits for them');
is(status_of('c'), $stranger, 'a stranger waits, too');
is(status_of('done'), 'completed', 'a completed key is answered at once');

# A replay, a refusal, a release and a rollback let go of their own lock only
is( $one->query(q{SELECT status FROM idem_claim('done');
		SELECT idem_once('done'), idem_release('never'), idem_forget('never');
		SELECT status FROM idem_claim_batch(ARRAY['done', 'done']);
		SELECT count(*) FROM idem_lookup('done')}),
	"completed\nf|f|f\ncompleted\ncompleted\n1", 'replays beside claims');
is(status_of('a'), 'in_progress', '... and the claim is still locked');
is( $one->query(q{SAVEPOINT s; SELECT claimed FROM idem_claim('in savepoint');
		ROLLBACK TO s; SAVEPOINT s2; SELECT status FROM idem_claim('done');
		ROLLBACK TO s2; SELECT idem_release('b')}),
	"t\ncompleted\nt", 'savepoints and releases beside claims');
is(status_of('a'), 'in_progress', '... and the claim is still locked');
$two->send(q{SELECT job('c')});
$two->wait_blocked if $collide;
is( $one->query(q{SELECT idem_complete('a', '1');
		SELECT idem_complete('a', '2', store => 'other'); COMMIT}),
	"1\n2", 'they complete');
is($two->answer, 't', 'then the stranger claims');
is( sql(q{SELECT a.result, o.result FROM idem_claim('a') a,
		idem_claim('a', store => 'other') o}),
	'1|2', 'each store has its own');
is(sql(q{SELECT idem_once('b'), idem_once('in savepoint')}),
	't|t', 'what was given up is free');

# A stranger in a savepoint that is rolled back keeps no lock
$one->query(q{BEGIN; SAVEPOINT s; SELECT claimed FROM idem_claim('x')});
$two->send(q{SELECT job('y')});
$two->wait_blocked if $collide;
$one->query(q{ROLLBACK TO s});
is($two->answer, 't', 'a rolled back savepoint lets the stranger go on');
$one->query('COMMIT');

# Batches in opposite orders, many times, do not deadlock
{
	my $file = PostgreSQL::Test::Utils::tempdir() . '/batch.sql';
	append_to_file($file, <<'END');
\set a random(1, 500)
\set b random(1, 500)
WITH c AS (SELECT * FROM idem_claim_batch(ARRAY['b' || :a, 'b' || :b, 'b' || :a])
	WHERE claimed), e AS (INSERT INTO effect SELECT key FROM c)
SELECT count(idem_complete(key, to_jsonb(key))) FROM c;
END
	$node->command_ok(
		[
			'pgbench', '-n', '-c', '6', '-t', '300', '-f', $file,
			$node->connstr('postgres')
		],
		'batches in any order');
}

# Beyond half of max_locks_per_transaction, claims stand as rows: their own
# lock goes, a stranger's claims of the same transaction keep theirs
is( $one->query(q{BEGIN; SELECT count(*) FROM generate_series(1, 200) n,
		idem_claim('m' || n) WHERE claimed}),
	'200', 'many claims');
is(status_of('m1'), 'in_progress', 'the first is in progress');
is(status_of('m200'), 'in_progress', 'the last is in progress');
is(status_of('stranger'), $stranger, 'a stranger waits for the first ones');
$two->send(q{SELECT job('m200')});
$two->wait_blocked;
is( $one->query(q{SELECT count(idem_complete('m' || n, n)) FROM
		generate_series(1, 200) n; COMMIT}),
	'200', 'they complete');
is($two->answer, 'f', 'the waiter is answered');

# One that stands as a row waits at its completion for a stranger that has got
# the lock: nobody is to be in the middle of a look-up
{
	my $collisions = $collide ? 'SET idem.debug_lock_collisions =' : 'SELECT';

	is( $one->query(qq{$collisions false; BEGIN;
			SELECT count(*) FROM generate_series(1, 100) n,
			idem_claim('f' || n) WHERE claimed; $collisions true;
			SELECT claimed FROM idem_claim('row')}) =~ s/^[ft]\n//mgr,
		"100\nt", 'a claim after many');
	is($two->query(q{BEGIN; SELECT job('holder')}), 't', 'a stranger');
	$one->send(q{SELECT idem_complete('row', '1')});
	$one->wait_blocked if $collide;
	$two->query('COMMIT');
	is($one->answer, '1', 'it is completed after the stranger');
	$one->query(qq{$collisions false;
		SELECT count(idem_complete('f' || n)) FROM generate_series(1, 100) n;
		COMMIT; $collisions true});
	is( sql(q{SELECT count(*) FROM idem_completions WHERE key ~ '^f\d+$'
			OR key = 'row'}),
		'101', 'all are there');
}

# Prepared
$one->query(q{BEGIN; SELECT job('prepared'); PREPARE TRANSACTION 'p'});
is(status_of('stranger'), $stranger, 'a stranger waits for a prepared one');
sql(q{COMMIT PREPARED 'p'});
is(status_of('stranger'), 'claimed', 'but not longer');

# Opposite orders in transactions do deadlock, or not: no lock, no deadlock
$one->query(q{BEGIN; SELECT job('d1')});
$two->query(q{BEGIN});
$two->send(q{SELECT job('d2')});
if ($collide)
{
	$two->wait_blocked;
	is($one->query(q{SELECT job('d2'); COMMIT}), 't', 'no deadlock');
	is($two->answer, 'f', 'the second waited at its first key');
}
else
{
	is($two->answer, 't', 'no collision, no wait');
	$one->query('COMMIT');
}
$two->query('COMMIT');

# Load: whatever waits for whatever, each effect is there once
{
	my $file = PostgreSQL::Test::Utils::tempdir() . '/load.sql';
	append_to_file($file, <<'END');
\set a random(1, 400)
\set b random(1, 400)
\set how random(1, 4)
BEGIN;
SELECT job('l' || :a);
SAVEPOINT s;
SELECT job('l' || :a, 'other');
\if :how = 1
ROLLBACK TO s;
\else
RELEASE s;
\endif
SELECT idem_once('l' || :b);
\if :how = 2
ROLLBACK;
\else
COMMIT;
\endif
END
	$node->command_ok(
		[
			'pgbench', '-n', '-c', '8', '-t', '250', '-f', $file,
			$node->connstr('postgres')
		],
		'load');
}
is( sql(q{SELECT count(*) FROM (SELECT FROM effect WHERE key !~ '^l'
		GROUP BY key HAVING count(*) > 1) x}),
	'0', 'no effect is there twice');
is( sql(q{SELECT count(*) FROM (SELECT key, count(*) n FROM effect
		WHERE key ~ '^l' GROUP BY key) e
		FULL JOIN (SELECT key, count(*) n FROM (SELECT key FROM idem_completions
			WHERE key ~ '^l' AND result IS NOT NULL
			UNION ALL SELECT key FROM other WHERE key ~ '^l') c GROUP BY key) c
		USING (key) WHERE e.n IS DISTINCT FROM c.n}),
	'0', 'effects and records agree');

$_->quit foreach $one, $two;
$node->stop;
done_testing();
