# Expiry against everything that can stand in the middle of something: each
# schedule that the banner of expiry.c argues about.
#
# Every step is made by CALL idem_expire(), and time passes by moving the notes
# into the past.  A session stands still at a lock that somebody else has; a
# stopped one stays there when it has been given that lock, so that it has
# what it knew before and gets no invalidations.  A trigger stands at a gate.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $node = idem_node('main', conf => q{
autovacuum = off
max_prepared_transactions = 10
idem.wait_timeout = -1
});

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

sql(q{
	CREATE FUNCTION pass(passed text, by interval) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		t timestamptz[];
	BEGIN
		SELECT sealed_at INTO t FROM idem_store_state WHERE store_name = passed;
		FOR i IN coalesce(array_lower(t, 1), 1) .. coalesce(array_upper(t, 1), 0) LOOP
			t[i] := t[i] - by;
		END LOOP;
		UPDATE idem_store_state SET sealed_at = t, filling_since = filling_since - by
		WHERE store_name = passed;
	END $$;
	-- stands still while somebody has the exclusive advisory lock 1
	CREATE FUNCTION gate() RETURNS int LANGUAGE plpgsql AS $$
	BEGIN
		WHILE NOT pg_try_advisory_xact_lock_shared(1) LOOP
			PERFORM pg_sleep(0.01);
		END LOOP;
		RETURN 1;
	END $$;
	CREATE FUNCTION gate_trigger() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM public.gate();
		RETURN NULL;
	END $$});

my $keeper = session($node);    # of locks and gates

sub expire
{
	my ($store, $by) = @_;
	sql("SELECT pass('$store', '$by')") if defined $by;
	return sql("CALL idem_expire('$store')");
}

# The states of the generations, and the records with their generations
sub truth
{
	my ($store) = @_;
	return sql(
		"SELECT array_to_string(states, ' '), (SELECT string_agg(key || generation, ' ' "
		  . "ORDER BY key, generation) FROM $store) FROM idem_stores "
		  . "WHERE store = '$store'::regclass");
}

sub status
{
	my ($store, $key) = @_;
	return sql("SELECT status FROM idem_try_claim('$key', store => '$store'), "
		  . "idem_release('$key', store => '$store')");
}

# A store with a retention of an hour and an old record in generation 0, which
# is filling, or sealed if $sealed
sub new_store
{
	my ($store, $sealed) = @_;
	sql("SELECT idem_create_store('$store', '1 hour', 4);
		INSERT INTO $store (key, completed_at, result) VALUES ('old', '2000-01-01', to_json(repeat('x', 100)))");
	expire($store);
	expire($store, '1 day') if $sealed;
	return;
}

# A session that knows the store as it is now
sub warm_session
{
	my ($store) = @_;
	my $session = session($node);
	$session->query("SELECT idem_try_claim('warm', store => '$store'), "
		  . "idem_release('warm', store => '$store')");
	return $session;
}

# Sends $sql, which comes to stand at the lock on $relation, and stops the
# session there with that lock
sub stop_at
{
	my ($session, $relation, $sql) = @_;
	$keeper->query("BEGIN; LOCK TABLE $relation IN ACCESS EXCLUSIVE MODE");
	$session->send($sql);
	$session->wait_blocked;
	kill('STOP', $session->pid) or die "cannot stop ${\ $session->pid}: $!";
	$keeper->query('COMMIT');
	return;
}

sub go_on
{
	my ($session) = @_;
	kill('CONT', $session->pid) or die "cannot continue ${\ $session->pid}: $!";
	return;
}

# Waits until a session stands at the gate
sub wait_gate
{
	my ($session) = @_;
	$node->poll_query_until('postgres',
		"SELECT wait_event = 'PgSleep' FROM pg_stat_activity "
		  . "WHERE pid = ${\ $session->pid}")
	  or die 'it never came to the gate';
	return;
}

# A writer knows the old generation as the current one; meanwhile there is a
# flip

foreach my $where ('at the door', 'on its last look')
{
	my $store = $where eq 'at the door' ? 'writer1' : 'writer2';
	new_store($store);
	my $writer = warm_session($store);
	my $expirer = warm_session($store);

	$writer->query("BEGIN; SELECT idem_claim('k', store => '$store')");
	sql("SELECT pass('$store', '1 day')");
	if ($where eq 'at the door')
	{
		# of the old one: SHARE lets nobody write, and nobody seal
		$keeper->query("BEGIN; LOCK TABLE ${store}_0 IN SHARE MODE");
		$writer->send("SELECT idem_complete('k', '1', store => '$store')");
		$writer->wait_blocked;
	}
	else
	{
		# at the others, with the old one locked
		stop_at($writer, "${store}_2",
			"SELECT idem_complete('k', '1', store => '$store')");
	}
	$expirer->query("CALL idem_expire('$store')");
	is(truth($store), 'full filling empty empty|old0', "flip, $where: done");
	if ($where eq 'at the door')
	{
		$keeper->query('COMMIT');
	}
	else
	{
		go_on($writer);
	}
	is($writer->answer, '1', "flip, $where: the writer goes on");
	# who got no further than the door holds no lock on the old one
	my $old = $where eq 'at the door' ? 'sealed' : 'full';
	$expirer->query("CALL idem_expire('$store')");
	is(truth($store), "$old filling empty empty|old0", "flip, $where: $old");
	$writer->query('COMMIT');
	is(truth($store), "$old filling empty empty|k1 old0",
		"flip, $where: it wrote into the new one");
	$_->quit foreach $writer, $expirer;
}

# A claim stands between two of its probes: it has looked where a lease is to
# be moved to, not yet where it is

{
	new_store('probe');
	sql(q{INSERT INTO probe (key, status, lease_until) VALUES ('lease', 'leased', 'infinity');
		UPDATE idem_store_state SET current = 1, filling_since = now() WHERE store_name = 'probe'});
	my $claimer = warm_session('probe');

	stop_at($claimer, 'probe_0',
		q{SELECT status FROM idem_try_claim('lease', store => 'probe')});
	expire('probe');
	expire('probe', '2 hours');
	like(truth('probe'), qr/^full .*lease0/, 'between probes: the lease has to stay');
	go_on($claimer);
	is($claimer->answer, 'in_progress', 'between probes: it is found');
	expire('probe');
	unlike(truth('probe'), qr/lease0/, 'between probes: then it goes');
	is(status('probe', 'lease'), 'in_progress', 'between probes: it is found there');
	$claimer->quit;
}

# An ordinary look-up stands before the generation that it will find it in
{
	new_store('reader');
	sql(q{INSERT INTO reader (key, status, lease_until) VALUES ('lease', 'leased', 'infinity')});
	my $reader = warm_session('reader');

	$reader->query(q{SELECT idem_lookup('lease', 'reader')});
	stop_at($reader, 'reader_0', q{SELECT key, generation FROM idem_lookup('lease', 'reader')});
	expire('reader', '1 day');
	expire('reader', '1 day');
	is(truth('reader'), 'sealed sealed filling empty|lease2 old0',
		'reader: the lease has moved twice');
	go_on($reader);
	is($reader->answer, 'lease|0', 'reader: it is found where it was');
	expire('reader');
	is(truth('reader'), 'empty sealed filling empty|lease2',
		'reader: emptied after that');
	$reader->quit;
}

# A result is being detoasted while its generation is due

{
	new_store('toast');
	sql(q{UPDATE toast SET result = (SELECT to_json(string_agg(md5(n::text), '')) FROM generate_series(1, 5000) AS n)});
	my $md5 = sql(q{SELECT md5(result::text) FROM toast});
	my $index = sql(q{SELECT indexrelid::regclass FROM pg_index
		WHERE indrelid = (SELECT reltoastrelid FROM pg_class WHERE relname = 'toast_0')});
	expire('toast', '1 day');
	foreach my $call (
		q{SELECT md5(result::text) FROM idem_claim('old', store => 'toast')},
		q{SELECT md5(result::text) FROM idem_lookup('old', 'toast')},
		q{SELECT md5(result::text) FROM toast})
	{
		my $reader = warm_session('toast');

		$keeper->query("BEGIN; REINDEX INDEX $index");
		$reader->send($call);
		$reader->wait_blocked;
		kill('STOP', $reader->pid);
		$keeper->query('ROLLBACK');
		expire('toast', '1 day');
		is(truth('toast'), 'sealed filling empty empty|old0',
			'detoasting: not emptied');
		go_on($reader);
		is($reader->answer, $md5, 'detoasting: the whole result');
		$reader->quit;
	}
	expire('toast');
	is(truth('toast'), 'empty filling empty empty|', 'detoasting: emptied after that');
}

# A generation is being emptied: who comes now waits for that, and no longer

foreach my $end ('commit', 'cancel')
{
	my $store = "emptying_$end";
	new_store($store, 1);
	sql("CREATE TRIGGER gate BEFORE TRUNCATE ON ${store}_0 EXECUTE FUNCTION gate_trigger();
		SELECT idem_once('young', store => '$store'); SELECT pass('$store', '2 hours')");
	my ($expirer, $setter, $claimer, $reader, $replayer) =
	  map { session($node) } 1 .. 5;

	$_->query("SELECT idem_lookup('warm', '$store')")
	  foreach $setter, $claimer, $reader, $replayer;
	$keeper->query('SELECT pg_advisory_lock(1)');
	$expirer->send("CALL idem_expire('$store')");
	wait_gate($expirer);
	$claimer->send("BEGIN; SELECT status FROM idem_claim('old', store => '$store')");
	$replayer->send("SELECT status FROM idem_claim('young', store => '$store')");
	$reader->send("SELECT status FROM idem_lookup('old', '$store')");
	$setter->send("SELECT idem_set_retention('30 days', '$store')");
	$_->wait_blocked foreach $claimer, $replayer, $reader, $setter;
	sql("CALL idem_expire('$store')");
	is( sql("SELECT generations_expired FROM idem_store_state WHERE store_name = '$store'"),
		'0', "emptying ($end): another round leaves it alone");
	if ($end eq 'commit')
	{
		$keeper->query('SELECT pg_advisory_unlock(1)');
		is($expirer->answer, '', "emptying ($end): done");
		is($claimer->answer, 'claimed', "emptying ($end): claimed after it");
		is($reader->answer, '', "emptying ($end): not there after it");
	}
	else
	{
		sql("SELECT pg_cancel_backend(${\ $expirer->pid})");
		like($expirer->answer_error, qr/57014/, "emptying ($end): cancelled");
		$keeper->query('SELECT pg_advisory_unlock(1)');
		is($claimer->answer, 'completed', "emptying ($end): replayed after it");
		is($reader->answer, 'completed', "emptying ($end): there after it");
	}
	is($replayer->answer, 'completed', "emptying ($end): another generation");
	is($setter->answer, "public.$store", "emptying ($end): retention is set after it");
	$claimer->query('ROLLBACK');

	# From here on nothing goes by the old retention
	sql("INSERT INTO $store (key, completed_at, generation) VALUES ('day', now() - interval '1 day', 0)");
	sql("SELECT pass('$store', '2 hours'); CALL idem_expire('$store')") foreach 1 .. 3;
	is(status($store, 'day'), 'completed', "emptying ($end): the new retention counts");
	$_->quit foreach $expirer, $setter, $claimer, $reader, $replayer;
}

# first_sent: a claim that began before a generation was emptied, and has not
# looked there yet, must know that afterwards

{
	new_store('watermark', 1);
	sql(q{INSERT INTO watermark (key, completed_at) VALUES ('k', now() - interval '2 hours')});
	expire('watermark', '1 day');
	is(truth('watermark'), 'empty sealed filling empty|k1', 'watermark: prepared');
	sql(q{SELECT idem_once('next', store => 'watermark'); SELECT pass('watermark', '1 day')});
	my $claimer = warm_session('watermark');
	my $sent = sql(q{SELECT clock_timestamp() - interval '1 hour' + interval '2 seconds'});

	# It has looked into generation 2 and stands before 1.  By the retention
	# it is not too late yet.
	stop_at($claimer, 'watermark_2',
		"SELECT status FROM idem_try_claim('k', first_sent => '$sent', store => 'watermark')");
	$node->poll_query_until('postgres',
		"SELECT clock_timestamp() - interval '1 hour' > '$sent'")
	  or die 'time does not pass';
	expire('watermark');
	like(truth('watermark'), qr/^empty empty/, 'watermark: emptied');
	sql(q{SELECT idem_set_retention('30 days', 'watermark')});
	is( sql("SELECT watermark > '$sent' FROM idem_store_state WHERE store_name = 'watermark'"),
		't', 'watermark: moved');
	go_on($claimer);
	is($claimer->answer, 'too_late', 'watermark: read after the look-up');
	$claimer->quit;
}

# A row comes into a generation after it was sealed

{
	# generation named by hand
	new_store('late', 1);
	my $writer = session($node);

	$writer->query(q{BEGIN; INSERT INTO late (key, generation, completed_at)
		VALUES ('late', 0, now() - interval '2 hours')});
	expire('late', '2 hours');
	expire('late', '2 hours');
	like(truth('late'), qr/^full/, 'late row: not sealed any more');
	$writer->query('COMMIT');
	expire('late');
	like(truth('late'), qr/^sealed .*late0/, 'late row: sealed after the commit');
	expire('late', '59 minutes');
	is(status('late', 'late'), 'completed', 'late row: kept from then on');
	expire('late', '2 minutes');
	is(status('late', 'late'), 'claimed', 'late row: and then not');

	# the default was evaluated before the flip, the partition locked after it
	new_store('default_first');
	sql(q{ALTER TABLE default_first ADD COLUMN stand int DEFAULT gate()});
	$keeper->query('SELECT pg_advisory_lock(1)');
	$writer->send(q{BEGIN; INSERT INTO default_first (key) VALUES ('late')});
	wait_gate($writer);
	expire('default_first', '1 day');
	is(truth('default_first'), 'sealed filling empty empty|old0',
		'late default: sealed');
	$keeper->query('SELECT pg_advisory_unlock(1)');
	$writer->answer;
	$writer->query(q{UPDATE default_first SET completed_at = completed_at - interval '2 hours'
		WHERE key = 'late'});
	expire('default_first', '2 hours');
	$writer->query('COMMIT');
	expire('default_first');
	is(truth('default_first'), 'sealed filling empty empty|late0 old0',
		'late default: sealed again');
	expire('default_first', '59 minutes');
	is(status('default_first', 'late'), 'completed', 'late default: kept from then on');
	$writer->quit;
}

# What is open in another database is no reason to wait, unless it has been
# writing since before the sealing: then everybody's snapshots are that old

{
	$node->safe_psql('postgres', 'CREATE DATABASE elsewhere');
	new_store('before', 1);
	my $elsewhere = session($node, 'elsewhere');

	$elsewhere->query(q{BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1});
	new_store('reads', 1);
	expire('reads', '1 day');
	like(truth('reads'), qr/^empty/, 'elsewhere: reads');
	$elsewhere->query(q{CREATE TABLE t ()});
	expire('before', '1 day');
	like(truth('before'), qr/^empty/, 'elsewhere: writes');
	new_store('since', 1);
	expire('since', '1 day');
	$elsewhere->query('COMMIT');
	expire('since');
	like(truth('since'), qr/^empty/, 'elsewhere: wrote');
	$elsewhere->quit;
}

# Prepared transactions, over restarts

{
	my $one = session($node);

	new_store('prepared');
	sql(q{INSERT INTO prepared (key, status) VALUES ('lease', 'leased'), ('lease2', 'leased');
		SELECT idem_create_store('prepared2', '1 hour')});
	$one->query(q{BEGIN; SELECT idem_claim('k', store => 'prepared');
		SELECT idem_complete('k', '1', store => 'prepared');
		PREPARE TRANSACTION 'done';
		BEGIN; SELECT idem_claim('given up', store => 'prepared');
		SELECT idem_complete('given up', store => 'prepared');
		PREPARE TRANSACTION 'given up';
		BEGIN; SELECT idem_forget('lease', 'prepared');
		PREPARE TRANSACTION 'forget';
		BEGIN; SELECT idem_claim('lease3', store => 'prepared');
		SELECT idem_release('lease3', store => 'prepared');
		PREPARE TRANSACTION 'key'});
	sql(q{INSERT INTO prepared (key, status) VALUES ('lease3', 'leased')});
	expire('prepared', '1 day');
	is(truth('prepared'), 'full filling empty empty|lease0 lease21 lease30 old0',
		'prepared: flip, and a lease whose key is free moves');
	foreach my $stop ('immediate', 'fast')
	{
		$one->quit if $stop eq 'immediate';
		$node->stop($stop);
		$node->start;
		expire('prepared', '1 day');
		like(truth('prepared'), qr/^full .*lease0 .*lease30/, "prepared ($stop): not sealed");
		is(status('prepared', 'k'), 'in_progress', "prepared ($stop): in progress");
	}
	$keeper = session($node);
	$one = session($node);
	sql($_) foreach q{ROLLBACK PREPARED 'given up'}, q{COMMIT PREPARED 'key'};
	expire('prepared', '1 day');
	like(truth('prepared'), qr/^full .*lease0 /, 'prepared: not yet sealed');
	unlike(truth('prepared'), qr/lease30/, 'prepared: the other key is free again');
	sql(q{ROLLBACK PREPARED 'forget'});
	expire('prepared', '1 day');
	like(truth('prepared'), qr/^full /, 'prepared: one is left');
	sql(q{COMMIT PREPARED 'done'});
	sql(q{UPDATE prepared SET completed_at = now() - interval '1 day' WHERE key = 'k'});
	expire('prepared');
	like(truth('prepared'), qr/^sealed .*k0/, 'prepared: sealed after the last');
	expire('prepared', '59 minutes');
	is(status('prepared', 'k'), 'completed', 'prepared: kept from then on');
	is(status('prepared', 'given up'), 'claimed', 'prepared: not what was rolled back');
	expire('prepared', '2 minutes');
	is(status('prepared', 'k'), 'claimed', 'prepared: and then not');

	# The retention, too
	new_store('retention', 1);
	sql(q{SELECT pass('retention', '2 hours')});
	$one->query(q{BEGIN; SELECT idem_set_retention('30 days', 'retention');
		PREPARE TRANSACTION 'retention'});
	expire('retention');
	like(truth('retention'), qr/^sealed/, 'prepared retention: in the way');
	$one->quit;
	$node->stop('immediate');
	$node->start;
	$keeper = session($node);
	expire('retention');
	like(truth('retention'), qr/^sealed/, 'prepared retention: also after a crash');
	sql(q{COMMIT PREPARED 'retention'});
	expire('retention');
	like(truth('retention'), qr/^sealed/, 'prepared retention: counts');
}

# pg_dump has its snapshot, but not got that far yet, when a lease moves and
# all is to be emptied

{
	new_store('dumped');
	sql(q{INSERT INTO dumped (key, status, lease_until) VALUES ('lease', 'leased', 'infinity');
		SELECT idem_once('young', store => 'dumped');
		CREATE TABLE zzz ();
		CREATE DATABASE restored});
	my $file = PostgreSQL::Test::Utils::tempdir() . '/dump.sql';

	$keeper->query(q{BEGIN; LOCK TABLE zzz IN ACCESS EXCLUSIVE MODE});
	my $dump = IPC::Run::start(
		[
			$node->installed_command('pg_dump'), '-f', $file, '-t', 'zzz',
			'-t', 'dumped*',
			'-d', $node->connstr('postgres') . ' application_name=dump'
		],
		'>', \my $out, '2>', \my $err);
	$node->poll_query_until('postgres',
		q{SELECT wait_event_type = 'Lock' FROM pg_stat_activity
		WHERE application_name = 'dump'})
	  or die 'pg_dump did not come to the lock';
	expire('dumped', '1 day');
	expire('dumped', '1 day');
	expire('dumped', '1 day');
	is(sql(q{SELECT count(*) FROM dumped}), '3', 'pg_dump: not emptied');
	$keeper->query('COMMIT');
	$dump->finish or die $err;
	$node->safe_psql('restored', 'CREATE EXTENSION idem');
	$node->command_ok(
		[
			'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', '-f', $file,
			'-d', $node->connstr('restored')
		],
		'pg_dump: restored');
	is( $node->safe_psql('restored',
			q{SELECT string_agg(key || generation, ' ' ORDER BY key) FROM dumped}),
		'lease0 old0 young0', 'pg_dump: each record once, where it was');
	sql(q{UPDATE dumped SET completed_at = '2000-01-01' WHERE key = 'young'});
	expire('dumped');
	expire('dumped');
	like(sql(q{SELECT string_agg(key || generation, ' ' ORDER BY key) FROM dumped}),
		qr/^lease\d$/, 'pg_dump: emptied after that');
}

$keeper->quit;
$node->stop;
done_testing();
