# The worker or the whole server is killed in the middle of each step: what was
# not committed has not happened, nothing comes early, nothing is lost, and
# expiry continues where it was.

use strict;
use warnings;

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $node = idem_node('main', preload => 1, conf => q{
restart_after_crash = on
autovacuum = off
idem.naptime = 1
log_statement = none
});

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# A step that is named in "hold" stands still before it commits
sql(q{
	CREATE TABLE hold (step text);
	INSERT INTO hold VALUES ('');
	CREATE FUNCTION stand(step text) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		WHILE EXISTS (SELECT FROM public.hold AS h WHERE h.step = stand.step) LOOP
			PERFORM pg_sleep(0.01);
		END LOOP;
	END $$;
	CREATE FUNCTION stand_at_state() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		IF NEW.store_name <> 's' THEN
			RETURN NEW;
		ELSIF NEW.current <> OLD.current THEN
			PERFORM public.stand('flip');
		ELSIF NEW.generations_expired > OLD.generations_expired THEN
			PERFORM public.stand('emptying');
		ELSIF NEW.sealed_at[1] IS NOT NULL AND OLD.sealed_at[1] IS NULL THEN
			PERFORM public.stand('sealing');
		END IF;
		RETURN NEW;
	END $$;
	CREATE FUNCTION stand_at_row() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM public.stand('carrying over');
		RETURN OLD;
	END $$;
	CREATE TRIGGER stand BEFORE UPDATE ON idem_store_state
		FOR EACH ROW EXECUTE FUNCTION stand_at_state()});

sub states
{
	return sql(q{SELECT array_to_string(states, ' ') FROM idem_stores WHERE store = 's'::regclass});
}

sub records
{
	return sql(q{SELECT string_agg(key || generation, ' ' ORDER BY key, generation) FROM s});
}

sub wait_worker
{
	$node->poll_query_until('postgres',
		q{SELECT count(*) > 0 FROM pg_stat_activity
		WHERE backend_type = 'idem worker' AND wait_event = 'PgSleep'})
	  or die 'no worker has come to the step';
	return sql(q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idem worker'});
}

# Kills the postmaster, and starts another as soon as what it has left behind
# lets it
sub crash_server
{
	$node->kill9;
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		return if $node->start(fail_ok => 1);
		select(undef, undef, undef, 0.1);
		$node->stop('fast', fail_ok => 1);
	}
	die 'the server did not start';
}

# Kills the worker while it stands, and waits until the server has recovered
sub kill_worker
{
	my $before = sql(q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'});
	my $pid;

	# it is cancelled after a second, and the next one comes along
	do { $pid = wait_worker() } until $pid && kill('KILL', $pid);
	$node->poll_query_until('postgres',
		"SELECT pid <> $before FROM pg_stat_activity WHERE backend_type = 'checkpointer'")
	  or die 'the server did not come back';
	return;
}

sub kill_server
{
	wait_worker();
	crash_server();
	return;
}

my %kill = (worker => \&kill_worker, server => \&kill_server);
my %before = (
	'flip' => 'filling empty empty empty',
	'carrying over' => 'full filling empty empty',
	'sealing' => 'full filling empty empty',
	'emptying' => 'sealed filling empty empty');
my %after = (
	'flip' => 'full filling empty empty',
	'carrying over' => 'full filling empty empty',
	'sealing' => 'sealed filling empty empty',
	'emptying' => 'empty filling empty empty');
my @steps = ('flip', 'carrying over', 'sealing', 'emptying');

foreach my $victim ('worker', 'server')
{
	sql(q{SELECT idem_create_store('s', '1 hour', 4);
		CREATE TRIGGER stand BEFORE DELETE ON s_0 FOR EACH ROW EXECUTE FUNCTION stand_at_row();
		UPDATE hold SET step = 'flip';
		INSERT INTO s (key, completed_at) VALUES ('old', now() - interval '59 minutes');
		INSERT INTO s (key, status, lease_until) VALUES ('lease', 'leased', 'infinity')});
	$node->poll_query_until('postgres',
		q{SELECT filling_since IS NOT NULL FROM idem_store_state WHERE store_name = 's'})
	  or die 'no worker';
	sql(q{UPDATE idem_store_state SET filling_since = filling_since - interval '1 day' WHERE store_name = 's'});
	foreach my $i (0 .. $#steps)
	{
		my $step = $steps[$i];
		my $name = "$victim killed in $step";
		my $records = records();

		if ($step eq 'emptying')
		{
			# Due only from now on
			is(sql(q{SELECT idem_once('old', store => 's')}), 'f', "$name: not early");
			sql(q{UPDATE s SET completed_at = completed_at - interval '2 hours' WHERE key = 'old';
				UPDATE idem_store_state SET sealed_at[1] = sealed_at[1] - interval '2 hours' WHERE store_name = 's'});
		}
		$kill{$victim}->();
		is(states(), $before{$step}, "$name: states");
		is(records(), $records, "$name: records");
		is( sql(q{SELECT c.status, l.status FROM idem_try_claim('old', store => 's') AS c,
				idem_try_claim('lease', store => 's') AS l}),
			'completed|in_progress', "$name: answers");

		# On to the next step, which is held up in its turn
		sql("UPDATE hold SET step = '" . ($steps[ $i + 1 ] // '') . "'");
		ok( $node->poll_query_until('postgres',
				$step eq 'carrying over'
				? q{SELECT generation = 1 FROM s WHERE key = 'lease'}
				: "SELECT array_to_string(states, ' ') = '$after{$step}' FROM idem_stores WHERE store = 's'::regclass"),
			"$name: it continues");
	}
	is(records(), 'lease1', "$victim: the old one has gone");
	is( sql(q{SELECT generations_expired, watermark < now() - interval '1 hour' FROM idem_store_state
			WHERE store = 's'::regclass}),
		'1|t', "$victim: counted once");
	is(sql(q{SELECT idem_once('old', store => 's')}), 't', "$victim: may run again");
	sql(q{DROP TABLE s; DELETE FROM idem_store_state WHERE store_name = 's'});
}

# Killed again and again at any time, while records come and go within seconds

sql(q{DROP TRIGGER stand ON idem_store_state;
	SELECT idem_create_store('s', '1 second', 3);
	INSERT INTO s (key, status, lease_until) VALUES ('lease', 'leased', 'infinity')});
foreach my $kill (1 .. 4)
{
	my $n = 0;
	my $expired = sql(q{SELECT generations_expired FROM idem_store_state WHERE store_name = 's'});

	my @wrong;

	do
	{
		my $key = "$kill-" . ++$n;
		my $answer = sql("SELECT idem_once('$key', store => 's'), idem_once('$key', store => 's'), "
			  . "(SELECT status FROM idem_try_claim('lease', store => 's'))");

		push @wrong, "$key: $answer" if $answer ne 't|f|in_progress';
	  } while (
		sql(q{SELECT generations_expired FROM idem_store_state WHERE store_name = 's'}) <
		$expired + 2);
	is("@wrong", '', "killed at any time: answers in round $kill");
	my $key = "$kill-last";
	sql("SELECT idem_once('$key', store => 's')");
	my $start = sql('SELECT clock_timestamp()');
	crash_server();
	my $again = sql("SELECT idem_once('$key', store => 's'), clock_timestamp() - interval '1 second' < '$start'");
	ok($again =~ /^f/ || $again eq 't|f', "killed at any time: $key is not early");
	is(sql(q{SELECT count(*) FROM s WHERE key = 'lease'}), '1',
		'killed at any time: one lease');
}

$node->stop;
done_testing();
