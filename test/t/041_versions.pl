# A library and SQL objects of different versions: one clean error, never a wrong
# answer.
#
# First SQL objects that do not fit our library: scripts edited so that rows have
# a column more or less than it makes, and functions an argument more or less
# than it takes.  Then a library and a script of a next version, which fit each
# other: installed in a running server, in either order, with sessions that still
# have the old library, and taken back.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

use Idem;
use Installation;

my $script = edited(first_script(), qr/COMMENT ON (?:FUNCTION|PROCEDURE) .*?;\n/s, '');
my $update = 'ALTER EXTENSION idem UPDATE';

#
# SQL objects that do not fit
#
my $installation = installation('unfit');
my $node = start_node('unfit', $installation,
	"shared_preload_libraries = 'idem'\nidem.worker = off\n");
my $start = $node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()');

# Makes a database with our script's objects after edits: pairs of a pattern and
# what takes its place.  Each of the statements, alone in a transaction, has to
# be refused, and nothing to come of it.
my $number = 0;

sub refused
{
	my ($what, $edits, @statements) = @_;
	my $other = $script;

	while (my ($pattern, $replacement) = splice @$edits, 0, 2)
	{
		$other = edited($other, $pattern, $replacement);
	}
	put_script($installation, '0.' . ++$number, $other);
	my $name = database($node, "0.$number",
		'CREATE FUNCTION handler(request jsonb) RETURNS int LANGUAGE sql RETURN 1');
	foreach my $sql (@statements)
	{
		my ($rc, $out, $err) = $node->psql($name,
			"\\set VERBOSITY verbose\n\\set ON_ERROR_STOP 0\nBEGIN;\n$sql;\nCOMMIT;\n");
		my @errors = $err =~ /(?:ERROR|FATAL|PANIC): .*/g;
		is(@errors, 1, "$what: one error of $sql");
		like($err, qr/ERROR:  55000: SQL objects of extension "idem" .* library$/m,
			'which tells the cause');
		like($err, qr/^HINT: .*ALTER EXTENSION idem UPDATE/m, 'and what to do');
		is($out, '', 'no answer');
	}
	is($node->safe_psql($name, 'SELECT count(*) FROM idem_completions'),
		'0', 'nothing is stored');
	$node->safe_psql('postgres', "DROP DATABASE $name");
	return;
}

my $batch = q{SELECT * FROM idem_claim_batch('{k,l}')};
my @outcomes = (
	q{SELECT * FROM idem_claim('k')},
	q{SELECT idem_claim('k')},
	q{SELECT * FROM idem_try_claim('k')},
	q{SELECT * FROM idem_run('k', 'handler', '{}')},
	q{SELECT * FROM idem_lease('k')},
	q{SELECT * FROM idem_try_lease('k')});
my $end = qr/jsonb\n\);\n\nCOMMENT ON TYPE idem_outcome/;
my $next = "\n);\n\nCOMMENT ON TYPE idem_outcome";
refused('an outcome of more columns', [ $end, "jsonb,\n\tmore text$next" ], @outcomes);
refused('of fewer', [ qr/,\n\tcheckpoint $end/, $next ], @outcomes);

# The records are seen by who wrote them
my $record = q{INSERT INTO idem_completions (key, status, attempts, token, claimed_at, lease_until)
	VALUES ('k', 'leased', 1, 1, now(), now())};
my @records = (
	"$record; SELECT * FROM idem_lookup('k')",
	"$record; SELECT idem_lookup('k')",
	"$record; SELECT * FROM idem_resolve('k', true)",
	"$record; SELECT * FROM idem_resolve('k', true, 1)");
refused('a completion of more columns',
	[ qr/\tgeneration smallint\n\);/, "\tgeneration smallint,\n\tmore text\n);" ], @records);
refused('of fewer',
	[ qr/,\n\tgeneration smallint\n\);/, "\n);",
	  qr/COMMENT ON COLUMN idem_completion.generation .*?;\n/s, '' ], @records);

$end = qr/, checkpoint jsonb\)\nAS 'MODULE_PATHNAME', 'idem_claim_batch'/;
$next = ")\nAS 'MODULE_PATHNAME', 'idem_claim_batch'";
refused('a batch of more columns', [ $end, ", checkpoint jsonb, more text$next" ], $batch);
refused('of fewer', [ $end, $next ], $batch);

# What the views are made of: a column more, at the end of the list
foreach my $view (
	[ idem_store_status => 'idem_stores' ],
	[ idem_uncertain_records => 'idem_uncertain' ],
	[ idem_stat_counters => 'idem_stat' ],
	[ idem_stat_status => 'idem_health' ],
	[ idem_stat_hot_keys => 'idem_stat_keys' ],
	[ idem_stat_activity => 'idem_in_flight' ])
{
	my ($name, $its) = @$view;
	refused("$name of more columns",
		[ qr/CREATE FUNCTION $name\([^;]*?\)\n(?=RETURNS SETOF|AS )/s,
		  sub { $_[0] =~ s/\)\n$/, OUT more text)\n/r } ],
		"TABLE $its");
}

my @calls = (
	@outcomes, $batch,
	q{SELECT idem_complete('k', '1')},
	q{SELECT idem_complete('k', 1)},
	q{SELECT idem_release('k')},
	q{SELECT idem_once('k')},
	q{SELECT * FROM idem_lookup('k')},
	q{SELECT idem_forget('k')},
	q{SELECT idem_checkpoint('k', 1, '{}')},
	q{SELECT idem_extend('k', 1, '1 min')},
	q{SELECT * FROM idem_resolve('k', true)},
	q{SELECT * FROM idem_resolve('k', true, 1)},
	q{SELECT idem_set_retention('1 day')},
	q{SELECT idem_stat_reset()});
refused('an argument more',
	[ qr/store regclass DEFAULT 'idem_completions'\)/,
	  q{store regclass DEFAULT 'idem_completions', more int DEFAULT 0)} ], @calls);
refused('an argument more, before the others',
	[ qr/(?<=[(,\s])store regclass DEFAULT 'idem_completions'\)/,
	  q{store regclass DEFAULT 'idem_completions', more int DEFAULT 0)},
	  qr/(?:request jsonb|requests jsonb\[\]|result text) DEFAULT NULL,/,
	  sub { "more text DEFAULT 'x', $_[0]" =~ s/more text/earlier text/r } ],
	$outcomes[0], $batch, q{SELECT idem_complete('k')}, q{SELECT idem_once('k')});
refused('an argument less',
	[ qr/first_sent timestamptz DEFAULT NULL,\s*/, '' ], @outcomes);
refused('an argument less, of the others',
	[ qr/requests jsonb\[\] DEFAULT NULL,\s*/, '',
	  qr/token bigint DEFAULT NULL,\s*/, '',
	  qr/(?<=idem_once\(key text, )request jsonb DEFAULT NULL, /, '',
	  qr/, checkpoint jsonb(?=, store)/, '',
	  qr/, lease interval(?=, store)/, '',
	  qr/happened boolean, /, '' ],
	$batch,
	q{SELECT idem_complete('k', '1')},
	q{SELECT idem_complete('k', 1)},
	q{SELECT idem_release('k')},
	q{SELECT idem_once('k')},
	q{SELECT idem_checkpoint('k', 1)},
	q{SELECT idem_extend('k', 1)},
	q{SELECT * FROM idem_resolve('k', 'x')},
	q{SELECT * FROM idem_resolve('k', 1)});
refused('bookkeeping of fewer columns',
	[ qr/,\n\ttrouble text\n\);/, "\n);" ],
	q{SELECT idem_set_retention('1 day')},
	q{SELECT * FROM idem_claim('k', first_sent => now())},
	q{SELECT * FROM idem_stores});

is($node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()'),
	$start, 'the server has not crashed');
$node->stop;

#
# A next version: other outcomes, and one function by another name
#
sub edit_file
{
	my ($file, $pattern, $replacement) = @_;
	my $text = edited(slurp_file($file), $pattern, $replacement);
	open my $out, '>', $file or die "$file: $!";
	print $out $text;
	close $out or die "$file: $!";
	return;
}

my $build = PostgreSQL::Test::Utils::tempdir('build');
system_or_bail('cp', '-r', source() . '/../Makefile', source() . '/../idem.control',
	source(), $build);
unlink glob "$build/src/*.o $build/src/*.bc $build/*.so";
edit_file("$build/src/arguments.h",
	qr/(?<=#define IDEM_OUTCOME_COLUMNS\t)7/, '8');
edit_file("$build/src/lease_functions.c", qr/\bidem_extend\b/, 'idem_extend_2');
run_log([ 'make', '-s', '-C', $build, 'with_llvm=no', 'COPT=-O0',
	'PG_CONFIG=' . ($ENV{PG_CONFIG} || 'pg_config') ])
  or BAIL_OUT('the library of the next version was not made');

my $update_script = q{
ALTER TYPE idem_outcome ADD ATTRIBUTE more text;
DROP FUNCTION idem_claim_batch(text[], jsonb[], interval, regclass);
} . part($script, qr/CREATE FUNCTION idem_claim_batch.*?;\n/s) =~ s/checkpoint jsonb\)/checkpoint jsonb, more text)/r
  . part($script, qr/CREATE FUNCTION idem_extend.*?;\n/s)
  =~ s/CREATE/CREATE OR REPLACE/r =~ s/'idem_extend'/'idem_extend_2'/r;

my $v1 = first_version();
my $library_2 = "$build/idem.so";
my $stored = q{{"z": 1.10, "a": 1}};
my $state = q{SELECT extversion, (SELECT count(*) FROM idem_completions) FROM pg_extension WHERE extname = 'idem'};
my $replay = q{SELECT claimed, result::text FROM idem_claim('old')};
my $unfit = qr/55000: SQL objects of extension "idem" do not fit its library/;
my $missing = qr/42883: could not find function "idem_extend(_2)?" in file/;
my $claims = q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 18756};

# An installation and a server, with a database that has our version.
sub use_first
{
	my ($name, $conf) = @_;
	my $own = installation($name);
	my $server = start_node($name, $own, $conf);
	my $database = database($server, $v1,
		"BEGIN; SELECT claimed FROM idem_claim('old'); SELECT idem_complete('old', '$stored'); COMMIT");

	return ($own, $server, $database);
}

# Not preloaded: each session loads the library that it finds
my ($own, $server, $database) = use_first('loaded', '');
my $old_library = "$build/old.so";
system_or_bail('cp', "$own->{lib}/idem.so", $old_library);
my $old = session($server, $database);
is($old->query($replay), "f|$stored", 'a session has the old library');

# The script is there, and the library is not yet
put_script($own, "$v1--9.9", $update_script);
put_script($own, '9.9', $script . $update_script);
my $fresh = session($server, $database);
like($fresh->error("$update TO '9.9'"), $missing, 'the old library refuses the new script');
is($fresh->query($state), "$v1|1", 'the old version stays');
is($fresh->query($replay), "f|$stored", 'and works');
$server->safe_psql('postgres', 'CREATE DATABASE other');
my $other = session($server, 'other');
like($other->error("CREATE EXTENSION idem VERSION '9.9'"), $missing, 'so with a new installation');
is($other->query(q{SELECT count(*) FROM pg_class WHERE relname LIKE 'idem%'}), '0', 'which leaves nothing');

# The library is there, and the script has not been run yet
put_library($own, $library_2);
my $new = session($server, $database);
like($new->error($replay), $unfit, 'the new library refuses old objects');
like($new->error(q{SELECT * FROM idem_try_claim('new')}), $unfit, 'in a claim');
like($new->error(q{SELECT * FROM idem_claim_batch('{new}')}), $unfit, 'and a batch');
like($new->error(q{SELECT * FROM idem_lease('new')}), $unfit, 'and a lease');
like($new->error(q{SELECT idem_extend('new', 1, '1 min')}), $missing, 'and what it has no more');
is($new->query($claims), '0', 'nothing is held');
is($new->query(q{SELECT idem_once('once')}), 't', 'what fits works');
is($old->query(q{SELECT idem_once('once')}), 'f', 'together with the old library');
is($old->query($replay), "f|$stored", 'which goes on to work');

# Both claim the same keys with the same locks
$old->query('BEGIN');
is($old->query(q{SELECT claimed FROM idem_claim('both')}), 't', 'the old library claims');
$new->send(q{SELECT idem_once('both')});
$new->wait_blocked;
$old->query(q{SELECT idem_complete('both', '1'); COMMIT});
is($new->answer, 'f', 'and the new one waits for it');

$new->query("$update TO '9.9'");
is($new->query($state), '9.9|3', 'updated');
is($new->query($replay), "f|$stored", 'an old record is replayed');
is($new->query(q{SELECT status, more FROM idem_try_claim('old')}), 'completed|', 'with the new column');
is($new->query(q{SELECT count(*) FROM idem_claim_batch('{old}')}), '1', 'also of a batch');
like($old->error($replay), $unfit, 'the old library refuses new objects');
like($old->error(q{SELECT * FROM idem_claim_batch('{new}')}), $unfit, 'in a batch, too');
like($old->error(q{SELECT idem_extend('new', 1, '1 min')}), $missing, 'and what it does not have');
is($old->query($claims), '0', 'nothing is held');
$old->quit;
$old = session($server, $database);
is($old->query($replay), "f|$stored", 'after a new connection it works');

# The files are taken back, the objects are not
put_library($own, $old_library);
$old->quit;
$old = session($server, $database);
like($old->error($replay), $unfit, 'a library that was taken back refuses new objects');
is($old->query($state), '9.9|3', 'whose records are all there');
$_->quit foreach $old, $new, $fresh, $other;
$server->stop;

# Preloaded: all have the old library until the server is restarted
($own, $server, $database) = use_first('preloaded',
	"shared_preload_libraries = 'idem'\nidem.worker = off\n");
put_script($own, "$v1--9.9", $update_script);
put_library($own, $library_2);
$new = session($server, $database);
is($new->query($replay), "f|$stored", 'preloaded: the old library stays loaded');
like($new->error("$update TO '9.9'"), $missing, 'and refuses the update');
is($new->query($state), "$v1|1", 'the old version stays');
$new->quit;
$server->restart;
$new = session($server, $database);
like($new->error($replay), $unfit, 'after a restart the new one refuses old objects');
$new->query("$update TO '9.9'");
is($new->query($replay), "f|$stored", 'and after the update it works');
$new->quit;
$server->stop;

done_testing();
