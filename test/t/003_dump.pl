# pg_dump and restore: every key replays its bytes, nothing is doubled.
#
# The extension lives in a schema of its own, stores have odd names in several
# schemas.  Whatever way a dump takes (plain or custom, in one piece or schema
# and data apart, with a store left out), the restore must raise no error, and
# the restored database must answer every key as the old one did.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my @stores = (
	'idem.idem_completions',
	'plain',
	q{"Quoted ""Name"" with space"."It's a ""Store"""},
	'"Upper"."Case"',
	'"Upper".' . 'l' x 63,
	'"Upper".' . 'l' x 62 . 'x',
	'"Upper"."' . "\xc3\xa9" x 31 . '"',
	'two.plain');
my @results = (
	'null', '0', 'false', '""', '{}', '{"b":1.10,"a":1e2,"a":2}',
	'"\u0000"', '1533947986218845197', '  [1,   2]  ', 'NULL');

my $node = idem_node('main', conf => "log_statement = none\n");
my $dump = PostgreSQL::Test::Utils::tempdir();

sub quote
{
	my ($text) = @_;
	$text =~ s/'/''/g;
	return "'$text'";
}

# What a database knows: each store and key with its answer.
sub state_of
{
	my ($database, @list) = @_;
	my $state = '';

	foreach my $store (@list)
	{
		$state .= "$store:\n"
		  . $node->safe_psql($database,
			    'SELECT key, status, completed_at, fingerprint, '
			  . "coalesce(result::text, 'NULL') FROM $store ORDER BY key")
		  . "\n";
	}
	return $state;
}

# Claims every key again in every store; returns what was not a replay of the
# right bytes.
sub wrong_answers
{
	my ($database, @list) = @_;
	my $wrong = '';

	foreach my $store (@list)
	{
		$wrong .= $node->safe_psql($database,
			'SELECT s.key, c.claimed, c.status, c.result, s.result '
			  . "FROM $store s, idem.idem_claim(s.key, request => "
			  . "to_jsonb(s.key), store => ${\ quote($store)}) c "
			  . 'WHERE c.claimed OR c.status <> \'completed\' '
			  . 'OR c.result::text IS DISTINCT FROM s.result::text');
	}
	return $wrong;
}

# A dump file goes into a new database; any error is fatal.
sub restore
{
	my ($database, @files) = @_;

	$node->safe_psql('postgres', "CREATE DATABASE $database");
	foreach my $file (@files)
	{
		if ($file =~ /\.sql$/)
		{
			$node->command_ok(
				[
					'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1',
					'-d', $node->connstr($database), '-f', $file
				],
				"$database: psql without errors");
		}
		else
		{
			$node->command_ok(
				[
					'pg_restore', '--exit-on-error',
					'-d', $node->connstr($database), $file
				],
				"$database: pg_restore without errors");
		}
	}
	return;
}

sub dump_to
{
	my ($file, @options) = @_;

	$node->command_ok(
		[ 'pg_dump', '-f', "$dump/$file", @options, $node->connstr('source') ],
		"pg_dump to $file");
	return "$dump/$file";
}

# A restored database must equal the source.
sub same
{
	my ($database, @list) = @_;

	is(state_of($database, @list),
		state_of('source', @list), "$database: the same records");
	is(wrong_answers($database, @list), '', "$database: the same answers");
	foreach my $store (@list)
	{
		is( $node->safe_psql($database,
				"SELECT count(*) FILTER (WHERE idem.idem_once('new'||g, "
				  . "store => ${\ quote($store)})) FROM generate_series(1,3) g"),
			3,
			"$database: $store takes new keys");
	}
	is( $node->safe_psql($database,
			"SELECT schema_name, store_name, retention FROM "
			  . 'idem.idem_store_state ORDER BY 1, 2'),
		$node->safe_psql('source',
			"SELECT schema_name, store_name, retention FROM "
			  . 'idem.idem_store_state ORDER BY 1, 2'),
		"$database: the same bookkeeping");
	return;
}

$node->safe_psql(
	'postgres', 'DROP EXTENSION idem; CREATE ROLE clerk;
	CREATE DATABASE source');
$node->safe_psql(
	'source', 'CREATE SCHEMA idem; CREATE EXTENSION idem SCHEMA idem;
	CREATE SCHEMA "Quoted ""Name"" with space"; CREATE SCHEMA "Upper";
	CREATE SCHEMA two');
foreach my $store (@stores[ 1 .. $#stores ])
{
	my $name = quote($store);
	$node->safe_psql('source',
		"SELECT idem.idem_create_store($name, '7 days', 3)");
}
foreach my $store (@stores)
{
	my $n = 0;
	my $sql = '';
	foreach my $result (@results)
	{
		my $key = quote("k$n é" . ('x' x ($n == 1 ? 500 : 0)));
		my $value = $result eq 'NULL' ? 'NULL' : quote($result);
		my $name = quote($store);
		$sql .= "BEGIN; SELECT idem.idem_claim($key, to_jsonb($key\::text), "
		  . "store => $name); SELECT idem.idem_complete($key, $value, "
		  . "store => $name); COMMIT;\n";
		$n++;
	}
	# a plain INSERT, and rows of an older generation
	$sql .= "INSERT INTO $store (key, result) VALUES ('plain', '{\"a\":1.0}');"
	  . "INSERT INTO $store (key, result, generation) VALUES ('old', '1', 2);";
	$node->safe_psql('source', $sql);
}
# The owner's own column, index, trigger, grant
$node->safe_psql(
	'source', q{
	ALTER TABLE two.plain ADD COLUMN note text NOT NULL DEFAULT 'n';
	CREATE INDEX ON two.plain (claimed_at);
	GRANT SELECT, INSERT ON two.plain, idem.idem_completions TO clerk;
	SELECT idem.idem_set_retention('3 days', 'idem.idem_completions')});

# In one piece
my $plain = dump_to('plain.sql');
restore('plain_copy', $plain);
same('plain_copy', @stores);
is( $node->safe_psql(
		'plain_copy', q{
		SELECT has_table_privilege('clerk', 'two.plain', 'INSERT'),
			has_table_privilege('clerk', 'plain', 'SELECT')}),
	't|f',
	'grants are restored');

my $custom = dump_to('custom', '-Fc');
restore('custom_copy', $custom);
same('custom_copy', @stores);

# Through the roots of the partitions, and as INSERTs
restore('root_copy',
	dump_to('root.sql', '--load-via-partition-root', '--column-inserts'));
same('root_copy', @stores);

# In two
restore('split_copy', dump_to('schema.sql', '--schema-only'),
	dump_to('data.sql', '--data-only'));
same('split_copy', @stores);

# A copy of the copy
$node->command_ok(
	[ 'pg_dump', '-f', "$dump/again.sql", $node->connstr('custom_copy') ],
	'pg_dump of a copy');
restore('second_copy', "$dump/again.sql");
is(state_of('second_copy', @stores),
	state_of('custom_copy', @stores), 'second_copy: the same records');

# CREATE DATABASE … TEMPLATE keeps oids, and is another database
$node->safe_psql('postgres', 'CREATE DATABASE clone TEMPLATE source');
same('clone', @stores);

# A store left out, with its partitions (without them, pg_dump makes a dump of
# any partitioned table that cannot be restored): its bookkeeping may stay,
# nothing else does
my @rest = grep { $_ ne 'plain' } @stores;
my %without = (without_copy => [ '-T', 'public.plain', '-T', 'public.plain_*' ]);
$without{without_children} = ['--exclude-table-and-children=public.plain']
  if $node->pg_version >= 16;
foreach my $copy (sort keys %without)
{
	restore($copy, dump_to("$copy.sql", @{ $without{$copy} }));
	is(state_of($copy, @rest), state_of('source', @rest),
		"$copy: the same records");
	is(wrong_answers($copy, @rest), '', "$copy: the same answers");

	# A store of that name made anew takes keys, once
	$node->safe_psql($copy, q{SELECT idem.idem_create_store('plain')});
	is( $node->safe_psql($copy,
			q{SELECT idem.idem_once('k', store => 'plain');
			SELECT idem.idem_once('k', store => 'plain')}),
		"t\nf",
		"$copy: a store made in the place of one left out");
}

# The default store left out; what its partitions hold comes all the same,
# unless they are left out too
restore('no_default_copy', dump_to('no_default.sql', '-T', 'idem.idem_completions'));
is(wrong_answers('no_default_copy', @stores),
	'', 'no_default_copy: the same answers');
restore('no_default_data_copy',
	dump_to('no_default_data.sql', '-T', 'idem.idem_completions*'));
is( $node->safe_psql('no_default_data_copy',
		'SELECT count(*) FROM idem.idem_completions'),
	'0',
	'no_default_data_copy: nothing in the default store');
@rest = @stores[ 1 .. $#stores ];
is(wrong_answers('no_default_data_copy', @rest),
	'', 'no_default_data_copy: the same answers elsewhere');

# After a store was dropped
$node->safe_psql('source', 'DROP TABLE "Upper"."Case"');
my @left = grep { $_ ne '"Upper"."Case"' } @stores;
restore('dropped_copy', dump_to('dropped.sql'));
is(state_of('dropped_copy', @left),
	state_of('source', @left), 'dropped_copy: the same records');
is(wrong_answers('dropped_copy', @left), '', 'dropped_copy: the same answers');

# Renamed, moved to another schema: still the same store
$node->safe_psql(
	'source', 'ALTER TABLE two.plain RENAME TO renamed;
	ALTER TABLE two.renamed SET SCHEMA "Upper"');
restore('renamed_copy', dump_to('renamed.sql'));
is(wrong_answers('renamed_copy', '"Upper".renamed'),
	'', 'renamed_copy: the same answers');

$node->stop;
done_testing();
