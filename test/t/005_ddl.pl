# DDL on a store under load: no wrong answer, and only errors that say what
# happened.
#
# Clients claim keys of a moving window, each key many times, while one after
# the other every kind of change is made to the store.  The ledger is a table
# of effects, written with each completion: at any time, effects and records
# must be the same, each once.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $clients = 4;
my $dir = PostgreSQL::Test::Utils::tempdir();
my $node = idem_node('main', conf => q{
log_statement = none
deadlock_timeout = 100ms
idem.wait_timeout = 60s
});

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# The store is looked up at each call, since some tests make it anew.
sql(q{
	CREATE TABLE effect (key text NOT NULL);
	CREATE TABLE seen (key text);
	SELECT idem_create_store('loaded', '7 days', 4);
	CREATE FUNCTION job(k text, s text) RETURNS boolean LANGUAGE plpgsql AS $$
	BEGIN
		IF NOT (SELECT claimed FROM idem_claim(k, store => s::regclass)) THEN
			RETURN false;
		END IF;
		INSERT INTO effect VALUES (k);
		PERFORM idem_complete(k, to_jsonb(k), store => s::regclass);
		RETURN true;
	END $$;
	CREATE FUNCTION work(j jsonb) RETURNS void LANGUAGE sql AS $$
		INSERT INTO effect VALUES (j #>> '{}') $$;
	CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO seen VALUES (NEW.key);
		RETURN NEW;
	END $$});

# Each client's work: single statements, transactions with a savepoint,
# idem_run, batches.  No two of them share more than one key, so that they
# cannot deadlock with each other.
my $number = 0;
my @statements = (
	"SELECT job('KEY', 'STORE');",
	"BEGIN; SELECT job('KEY', 'STORE'); SAVEPOINT a; "
	  . "SELECT job('KEYc', 'STORE'); COMMIT;",
	"SELECT status FROM idem_run('KEY', 'work', to_jsonb('KEY'::text), "
	  . "store => 'STORE');",
	"WITH c AS (SELECT * FROM idem_claim_batch(ARRAY['KEY', 'KEYb'], "
	  . "store => 'STORE') WHERE claimed), e AS (INSERT INTO effect SELECT "
	  . "key FROM c) SELECT idem_complete(key, to_jsonb(key), "
	  . "store => 'STORE') FROM c;");

sub start_load
{
	my ($store) = @_;
	my @load;

	foreach my $client (1 .. $clients)
	{
		my $file = "$dir/load" . ++$number;
		my $script = "\\set VERBOSITY verbose\n";

		foreach my $i (1 .. 30000)
		{
			my $key = 'k' . (int($i / 3) + int(rand(20)));
			$script .= ($statements[ rand(@statements) ] =~ s/KEY/$key/gr)
			  =~ s/STORE/$store/gr;
			$script .= "\n";
		}
		append_to_file("$file.sql", $script);
		push @load,
		  {
			errors => "$file.err",
			psql => IPC::Run::start(
				[
					$node->installed_command('psql'), '-XAtq',
					'-d', $node->connstr('postgres'), '-f', "$file.sql"
				],
				'>', '/dev/null', '2>', "$file.err")
		  };
	}
	return @load;
}

# Waits until some more effects are there, so that the load is known to run.
sub progress
{
	my ($ledger) = @_;
	my $before = sql('SELECT coalesce(max(ctid), \'(0,0)\') FROM effect');

	$node->poll_query_until('postgres',
		"SELECT count(*) > 50 FROM effect WHERE ctid > '$before'")
	  or die 'no progress';
	return;
}

# Ends the load; returns the SQLSTATEs that the clients met.
sub stop_load
{
	my @load = @_;
	my %states;

	foreach my $client (@load)
	{
		$client->{psql}->kill_kill(grace => 0);
		my $errors = slurp_file($client->{errors});

		# PostgreSQL locks no function between parsing and execution
		$errors =~ s/XX000: cache lookup failed for func/42883: no func/g;
		$states{$1}++ while $errors =~ /(?:ERROR|FATAL|PANIC):  (\w{5}):/g;
		note("$1") while $errors =~ /(.*(?:ERROR|FATAL|PANIC):  (?!4|25P02).*)/g;
	}
	$node->poll_query_until('postgres',
		q{SELECT count(*) = 1 FROM pg_stat_activity
		WHERE backend_type = 'client backend'}) or die 'clients stay';
	return join(' ', sort keys %states);
}

sub ledger_is_right
{
	my ($what, $store) = @_;

	is( sql("SELECT count(*) FROM effect e FULL JOIN $store c USING (key) "
			  . 'WHERE e IS NULL OR c IS NULL OR e.key <> c.result #>> \'{}\' '
			  . 'AND c.result IS NOT NULL'),
		'0',
		"$what: effects and records agree");
	is( sql('SELECT count(*) FROM (SELECT FROM effect GROUP BY key '
			  . 'HAVING count(*) > 1) x'),
		'0',
		"$what: each effect is there once");
	return;
}

# name, errors that may come, statements (each a transaction of its own)
my $key_index = sql(q{SELECT indexrelid::regclass FROM pg_index
	WHERE indrelid = 'loaded_0'::regclass AND indisreplident});
my @changes = (
	[
		'columns', '',
		q{ALTER TABLE loaded ADD COLUMN note text DEFAULT 'x'},
		q{ALTER TABLE loaded ADD COLUMN at timestamptz NOT NULL DEFAULT clock_timestamp()},
		q{ALTER TABLE loaded ALTER COLUMN note TYPE varchar(20)},
		q{ALTER TABLE loaded DROP COLUMN note, DROP COLUMN at},
	],
	[
		'indexes', '',
		q{CREATE INDEX CONCURRENTLY extra ON loaded_0 (status, key)},
		"REINDEX INDEX CONCURRENTLY $key_index",
		q{REINDEX TABLE CONCURRENTLY loaded_0},
		q{DROP INDEX CONCURRENTLY extra},
		q{CREATE UNIQUE INDEX second ON loaded_0 (key)},
		q{DROP INDEX second},
		q{REINDEX TABLE loaded_0},
	],
	[
		'rewrites', '',
		q{VACUUM FULL loaded_0},
		q{VACUUM (FREEZE) loaded},
		"CLUSTER loaded_0 USING $key_index",
		q{ALTER TABLE loaded_0 SET (fillfactor = 90)},
	],
	[
		# DROP TRIGGER locks partitions before the table, INSERT and claims
		# the other way round
		'constraints and triggers', '25P02 40P01',
		q{ALTER TABLE loaded ADD CONSTRAINT few CHECK (attempts < 100)},
		q{CREATE TRIGGER note AFTER INSERT ON loaded FOR EACH ROW
			EXECUTE FUNCTION note()},
		q{DROP TRIGGER note ON loaded},
		q{ALTER TABLE loaded DROP CONSTRAINT few},
		q{ANALYZE loaded},
	],
	[
		'partitions', '25P02 42809',
		q{BEGIN; ALTER TABLE loaded DETACH PARTITION loaded_3;
			ALTER TABLE loaded ATTACH PARTITION loaded_3 FOR VALUES IN (3); COMMIT},
		q{ALTER TABLE loaded DETACH PARTITION loaded_3},
		undef,
		q{ALTER TABLE loaded ATTACH PARTITION loaded_3 FOR VALUES IN (3)},
		q{ALTER TABLE loaded DETACH PARTITION loaded_2 CONCURRENTLY},
		undef,
		q{ALTER TABLE loaded ATTACH PARTITION loaded_2 FOR VALUES IN (2)},
	],
	[
		'truncate', '25P02 40P01',
		q{BEGIN; TRUNCATE loaded; TRUNCATE effect; COMMIT},
		q{BEGIN; TRUNCATE loaded_0; TRUNCATE effect; COMMIT},
		q{BEGIN; TRUNCATE loaded; TRUNCATE effect; ROLLBACK},
	],
	[
		'drop', '25P02 40P01 42P01',
		q{BEGIN; DROP TABLE loaded; TRUNCATE effect;
			SELECT idem_create_store('loaded'); COMMIT},
		q{BEGIN; ALTER TABLE loaded RENAME TO old;
			SELECT idem_create_store('loaded'); TRUNCATE effect;
			DROP TABLE old; COMMIT},
	],);

srand(42);
foreach my $change (@changes)
{
	my ($name, $expected, @commands) = @$change;
	my @load = start_load('loaded');
	my $states;

	progress();
	foreach my $command (@commands)
	{
		my ($rc, $out, $err) = (0, '', '');

		if (defined $command)
		{
			# A deadlock may choose the DDL as its victim
			do
			{
				($rc, $out, $err) = $node->psql('postgres',
					"\\set VERBOSITY verbose\n$command");
			} while ($err =~ /40P01/ && $expected =~ /40P01/);
			is($err, '', "$name: " . $command =~ s/\s+/ /gr);
		}
		progress()
		  unless !defined $command || $command =~ /DETACH PARTITION loaded_.( CONC|$)/;
	}
	$states = stop_load(@load);
	my %expected = map { $_ => 1 } split / /, $expected;
	is(join(' ', grep { !$expected{$_} } split / /, $states),
		'', "$name: no unexpected error (there were: $states)");
	ledger_is_right($name, 'loaded');
	sql('TRUNCATE loaded; TRUNCATE effect; TRUNCATE seen');
}

# The extension goes and comes back.  Stores made by users stay, with every
# record; the default store goes with the extension.
{
	my @load = start_load('loaded');
	my $states;

	progress();
	sql('DROP EXTENSION idem CASCADE');
	is(sql(q{SELECT count(*) FROM pg_attribute
		WHERE attrelid = 'loaded'::regclass AND attnum > 0
		AND NOT attisdropped}), '12', 'extension: the store stays');
	sql('CREATE EXTENSION idem');
	progress();
	sql('DROP EXTENSION idem CASCADE; CREATE EXTENSION idem');
	progress();
	$states = stop_load(@load);
	like($states, qr/^((25P02|40P01|42704|42883|42P01) ?)*$/,
		"extension: no unexpected error (there were: $states)");
	ledger_is_right('extension', 'loaded');
}

# The same with the default store, which is the extension's
sql('TRUNCATE effect');
{
	my @load = start_load('idem_completions');
	my $states;

	progress();
	is( sql(q{BEGIN; DROP EXTENSION idem CASCADE; TRUNCATE effect;
		CREATE EXTENSION idem; COMMIT}), '', 'default store: made anew');
	progress();
	$states = stop_load(@load);
	like($states, qr/^((25P02|40P01|42704|42883|42P01) ?)*$/,
		"default store: no unexpected error (there were: $states)");
	ledger_is_right('default store', 'idem_completions');
}

$node->stop;
done_testing();
