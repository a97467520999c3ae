# Memory: flat over a million calls in one backend, results of 64 MB, and
# 100,000 claims in one transaction at default settings.

use strict;
use warnings;

use Digest::MD5 'md5_hex';
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $node = idem_node('main', preload => 1, conf => q{
idem.worker = off
log_statement = none
autovacuum = off
max_wal_size = 4GB
});

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# Bytes in memory contexts of a session, and those of its process that are
# its own; contexts do not show what malloc() leaks.
sub memory
{
	my ($session) = @_;
	my $contexts = $session->query(
		'SELECT sum(total_bytes) FROM pg_backend_memory_contexts');
	my $process = 0;

	if (open my $status, '<', "/proc/${\ $session->pid}/status")
	{
		/^RssAnon:\s+(\d+) kB/ and $process = $1 * 1024 while <$status>;
		close $status;
	}
	return ($contexts, $process);
}

# Runs SQL that does something N times, twice: after the second run, which is
# longer, memory must be what it was after the first.
sub flat
{
	my ($name, $loop, $warm, $count, $conditions) = @_;
	my $session = session($node);
	my (@before, @after);

	$session->query($_) foreach @{ $conditions // [] };
	$session->query($loop =~ s/\bN\b/$warm/gr);
	@before = memory($session);
	$session->query($loop =~ s/\bN\b/$count/gr);
	@after = memory($session);
	note("$name: contexts $before[0] to $after[0], process $before[1] to $after[1]");
	cmp_ok($after[0] - $before[0], '<', 256 * 1024,
		"$name: memory contexts after $count");
	cmp_ok($after[1] - $before[1], '<', 2048 * 1024,
		"$name: memory of the process after $count");
	$session->quit;
	return;
}

sql(q{
	CREATE SEQUENCE next;
	SELECT idem_create_store('second');
	SELECT idem_create_store('triggered');
	CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
		'BEGIN RETURN coalesce(NEW, OLD); END';
	CREATE TRIGGER note BEFORE INSERT OR UPDATE OR DELETE ON triggered
		FOR EACH ROW EXECUTE FUNCTION note();
	CREATE FUNCTION handler(j jsonb) RETURNS jsonb LANGUAGE sql AS
		$$ SELECT jsonb_build_object('done', j) $$;
	BEGIN; SELECT claimed FROM idem_claim('done', '{"a":1}');
	SELECT idem_complete('done', '{"b":2}'); COMMIT;
	BEGIN; SELECT claimed FROM idem_claim('long');
	SELECT idem_complete('long', to_json(repeat('x', 20000))); COMMIT});

# A million calls and more, of one kind in each backend

flat('replays in one transaction', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM idem_claim('done', '{"a":1.0}'); END LOOP; END $$},
	20000, 300000);
flat('replays in FROM', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM result FROM idem_claim('done') WHERE NOT claimed;
	END LOOP; END $$}, 10000, 50000);
flat('replays in one statement',
	q{SELECT count(c) FROM (SELECT idem_try_claim('done') c,
		generate_series(1, N) OFFSET 0) s}, 20000, 150000);
flat('replays of a toasted result', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM idem_claim('long'); END LOOP; END $$}, 5000, 30000);
flat('claims of one transaction each', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM idem_claim('k' || nextval('next'), '{"a":1}');
	PERFORM idem_complete('k' || currval('next'), '{"b":1}');
	COMMIT; END LOOP; END $$}, 5000, 25000);
flat('once', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM idem_once('k' || nextval('next'));
	COMMIT; END LOOP; END $$}, 5000, 25000);
flat('run', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM idem_run('k' || nextval('next'), 'handler', '1');
	COMMIT; END LOOP; END $$}, 5000, 20000);
flat('batches', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM idem_complete(key, ordinality)
	FROM idem_claim_batch(ARRAY['k' || nextval('next'), 'done', 'k' || i])
	WHERE claimed;
	COMMIT; END LOOP; END $$}, 5000, 20000);
flat('releases', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM idem_claim('given up');
	PERFORM idem_release('given up'); END LOOP; END $$}, 10000, 100000);
flat('look-ups', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM idem_lookup('done'); END LOOP; END $$}, 10000, 50000);
flat('claims rolled back', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM idem_claim('k' || nextval('next'));
	PERFORM idem_complete('k' || currval('next'), '1');
	ROLLBACK; END LOOP; END $$}, 5000, 15000);
flat('claims in savepoints', q{DO $$ BEGIN FOR i IN 1..N LOOP
	BEGIN
		PERFORM idem_claim('saved');
		PERFORM idem_complete('saved', '1');
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN NULL;
	END; END LOOP; END $$}, 10000, 50000);
flat('savepoints in a savepoint', q{DO $$ BEGIN FOR i IN 1..N LOOP
	BEGIN
		PERFORM idem_claim('saved');
		PERFORM idem_release('saved');
	EXCEPTION WHEN division_by_zero THEN NULL;
	END; END LOOP; END $$}, 10000, 50000, ['BEGIN', 'SAVEPOINT a']);
flat('errors', q{DO $$
	DECLARE n int := 0;
	BEGIN FOR i IN 1..N LOOP
	BEGIN PERFORM idem_claim('done', '{"a":2}');
	EXCEPTION WHEN SQLSTATE 'ID001' THEN n := n + 1; END;
	BEGIN PERFORM idem_claim('');
	EXCEPTION WHEN invalid_parameter_value THEN n := n + 1; END;
	BEGIN PERFORM idem_complete('never', '1');
	EXCEPTION WHEN SQLSTATE 'ID005' THEN n := n + 1; END;
	BEGIN PERFORM idem_claim('k', store => 'pg_class');
	EXCEPTION WHEN wrong_object_type THEN n := n + 1; END;
	END LOOP;
	IF n <> 4 * N THEN RAISE 'only % errors', n; END IF;
	END $$}, 5000, 25000);
flat('triggers', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM idem_once('k' || nextval('next'), store => 'triggered');
	PERFORM idem_forget('k' || currval('next'), store => 'triggered');
	COMMIT; END LOOP; END $$}, 2000, 10000);
flat('invalidations', q{DO $$ BEGIN FOR i IN 1..N LOOP
	EXECUTE format('ALTER TABLE second ALTER attempts SET DEFAULT %s', i);
	PERFORM idem_once('k' || nextval('next'), store => 'second');
	PERFORM idem_claim('k' || currval('next'), store => 'second');
	COMMIT; END LOOP; END $$}, 300, 1500);

flat('leases', q{DO $$ DECLARE k text; t bigint; BEGIN FOR i IN 1..N LOOP
	k := 'k' || nextval('next');
	t := token FROM idem_lease(k, '{"a":1}');
	COMMIT;
	PERFORM idem_checkpoint(k, t, '{"step":1}'), idem_extend(k, t, '1 h');
	COMMIT;
	PERFORM idem_complete(k, '{"b":1}'::json, t);
	PERFORM idem_complete(k, '{"b":1}'::json, t);
	PERFORM idem_provider_key(k);
	COMMIT; END LOOP; END $$}, 2000, 8000);
flat('leases that run out', q{DO $$ DECLARE k text; BEGIN FOR i IN 1..N LOOP
	k := 'k' || nextval('next');
	INSERT INTO idem_completions (key, status, lease_until)
		VALUES (k, 'leased', '2000-01-01');
	COMMIT;
	PERFORM idem_try_lease(k), idem_try_claim(k);
	BEGIN PERFORM idem_lease(k);
	EXCEPTION WHEN SQLSTATE 'ID003' THEN NULL; END;
	IF i % 3 = 0 THEN PERFORM idem_resolve(k, true, i);
	ELSIF i % 3 = 1 THEN PERFORM idem_lease(k, on_uncertain => 'retry');
	ELSE PERFORM idem_lease(k, on_uncertain => 'skip');
	END IF;
	COMMIT; END LOOP; END $$}, 1000, 4000);

# And a million of all kinds in one: 16 calls in each turn
flat('a million calls in one backend', q{DO $$
	DECLARE k text; t bigint; n bigint := 0;
	BEGIN FOR i IN 1..N LOOP
	k := 'k' || nextval('next');
	PERFORM idem_claim(k, '{"a":1}');
	PERFORM idem_complete(k, '{"b":1}');
	COMMIT;
	n := n + count(*) FROM generate_series(1, 6) AS s,
		idem_claim(left(k, 100 + s), '{"a":1.0}') WHERE NOT claimed;
	t := token FROM idem_lease('l' || k);
	COMMIT;
	PERFORM idem_checkpoint('l' || k, t, '{"step":1}');
	PERFORM idem_complete('l' || k, '1'::json, t);
	BEGIN PERFORM idem_claim(k, '{"a":2}');
	EXCEPTION WHEN SQLSTATE 'ID001' THEN n := n + 1; END;
	BEGIN PERFORM idem_extend('l' || k, t, '1 h');
	EXCEPTION WHEN SQLSTATE 'ID005' THEN n := n + 1; END;
	BEGIN PERFORM idem_claim(NULL);
	EXCEPTION WHEN null_value_not_allowed THEN n := n + 1; END;
	BEGIN PERFORM idem_claim('saved'); PERFORM idem_once('also saved');
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN n := n + 1; END;
	COMMIT; END LOOP;
	IF n <> 10 * N THEN RAISE 'only % answers', n; END IF;
	END $$}, 4000, 64000);

my $holder = session($node);
$holder->query(q{BEGIN; SELECT claimed FROM idem_claim('held');
	INSERT INTO idem_completions (key) VALUES ('inserted')});
flat('waits that run out', q{DO $$ BEGIN FOR i IN 1..N LOOP
	PERFORM idem_try_claim('held', wait => '10us');
	PERFORM idem_try_claim('inserted', wait => '10us');
	BEGIN PERFORM idem_claim('held', wait => '0');
	EXCEPTION WHEN SQLSTATE 'ID002' THEN NULL; END;
	END LOOP; END $$}, 300, 2000);
$holder->query('ROLLBACK');
$holder->quit;

# 64 MB: stored, replayed, and fetched by a client, byte by byte

my $big = session($node);
$big->query(q{CREATE TABLE big (t text);
	ALTER TABLE big ALTER t SET STORAGE EXTERNAL;
	INSERT INTO big SELECT '{"b":1.10, "a":"' ||
		string_agg(md5(n::text), '') || '\u00e9"}'
	FROM generate_series(1, 2 * 1024 * 1024) n});
is( $big->query(q{BEGIN; SELECT claimed FROM idem_claim('big');
		SELECT md5(idem_complete('big', t)::text) = md5(t) FROM big; COMMIT}),
	"t\nt", '64 MB stored');
is($big->query(q{SELECT length(t) > 64 * 1024 * 1024, result::text = t
		FROM big, idem_claim('big')}),
	't|t', '64 MB replayed');
is( $big->query(q{SELECT result::text = t FROM big,
		idem_claim_batch(ARRAY['big', 'done']) WHERE ordinality = 1}),
	't', '64 MB replayed in a batch');
is($big->query(q{SELECT result::text = t FROM big, idem_lookup('big')}),
	't', '64 MB looked up');
is( $big->query(q{CREATE FUNCTION big(jsonb) RETURNS json LANGUAGE sql AS
		$$ SELECT to_json(repeat('big ', 16 * 1024 * 1024)) $$;
		SELECT claimed, length(result::text), md5(result::text) =
			md5(big(NULL)::text) FROM idem_run('big run', 'big');
		SELECT claimed, length(result::text), md5(result::text) =
			md5(big(NULL)::text) FROM idem_run('big run', 'big')}),
	"t|67108866|t\nf|67108866|t", '64 MB of a handler');
is( $big->query(q{BEGIN; SELECT claimed FROM idem_try_claim('big request',
		(SELECT t::jsonb FROM big), wait => '0');
		SELECT idem_release('big request'); COMMIT}),
	"t\nt", 'a request of 64 MB');
my $file = PostgreSQL::Test::Utils::tempdir() . '/big';
$big->query(
	"\\o $file\nSELECT result::text FROM idem_claim('big');\n\\o\nSELECT 1");
is($big->query("SELECT md5(t || E'\\n') FROM big"),
	md5_hex(slurp_file($file)),
	'64 MB at the client');
like(
	$big->error(q{BEGIN; SELECT claimed FROM idem_claim('broken');
		SELECT idem_complete('broken', left(t, -1)) FROM big}),
	qr/22P02/, '64 MB of what is not JSON');
$big->query('ROLLBACK');
is($big->query(q{SELECT count(*) FROM idem_lookup('broken')}),
	'0', 'and nothing is left of that');
$big->quit;

# 100,000 claims in one transaction; duplicates wait, wherever among them

is(sql('SHOW max_locks_per_transaction'), '64', 'default settings');
foreach my $end ('COMMIT', 'ROLLBACK')
{
	my $many = session($node);
	my $count = $end eq 'COMMIT' ? 100000 : 10000;
	my @wanted = (1, 20, 31, 32, 33, 34, 1000, $count - 1, $count);
	my @waiters = map { session($node) } @wanted;

	is( $many->query("BEGIN; SELECT count(*) FROM generate_series(1, $count) n,"
			  . "idem_claim('$end ' || n, to_jsonb(n)) WHERE claimed"),
		$count, "$end: $count claims");
	cmp_ok(sql("SELECT count(*) FROM pg_locks WHERE pid = ${\ $many->pid}"),
		'<', 64, "$end: few locks");
	is($many->query("SELECT status FROM idem_claim('$end 7777')"),
		'held', "$end: held");
	is( sql("SELECT string_agg(DISTINCT status, ',') FROM unnest('{"
			  . join(',', @wanted) . "}'::int[]) n, "
			  . "idem_try_claim('$end ' || n)"),
		'in_progress',
		"$end: in progress for others");
	foreach my $i (0 .. $#wanted)
	{
		$waiters[$i]->query('SET idem.wait_timeout = -1');
		$waiters[$i]->send("SELECT idem_once('$end $wanted[$i]')");
	}
	$_->wait_blocked foreach @waiters;
	is( $many->query("SELECT count(idem_complete('$end ' || n, n)) "
			  . "FROM generate_series(1, $count) n"),
		$count, "$end: $count completions");
	$many->query($end);
	is(join('', map { $_->answer } @waiters),
		($end eq 'COMMIT' ? 'f' : 't') x @wanted,
		"$end: the waiters are answered");
	is( sql("SELECT count(*) FROM generate_series(1, $count) n, "
			  . "idem_lookup('$end ' || n) l WHERE l.result::text = n::text"),
		$end eq 'COMMIT' ? $count : '0',
		"$end: records");
	is( sql("SELECT count(*) FROM idem_completions WHERE key LIKE '$end %' "
			  . "AND status <> 'completed'"),
		'0',
		"$end: no other records");
	$_->quit foreach $many, @waiters;
}
is( sql(q{SELECT count(idem_complete(key, ordinality)) FROM idem_claim_batch(
		(SELECT array_agg('batch ' || n) FROM generate_series(1, 20000) n))
		WHERE claimed}),
	'20000', 'a batch of 20,000, completed in one statement');

$node->stop;
done_testing();
