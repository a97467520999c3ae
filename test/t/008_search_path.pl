# Hostile objects: what another user puts in the way must never be run, at
# CREATE EXTENSION, when stores are made, by claims, nor by a definer's function.
#
# Every trap raises PWNED, at whatever cost to the statement that steps in it.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $node = idem_node('main', conf => "log_statement = none\n");

sub run
{
	my ($database, $sql) = @_;
	my ($rc, $out, $err) = $node->psql($database,
		"\\set VERBOSITY verbose\n\\set ON_ERROR_STOP 0\n$sql");
	return ($out, $err);
}

sub trap
{
	my ($schema) = @_;
	my @types = qw(text name oid int2 int4 int8 bool timestamptz uuid json jsonb
	  regclass interval "char" anyelement char);
	my $traps = qq{
		CREATE FUNCTION $schema.pwned() RETURNS void LANGUAGE plpgsql AS
			\$\$ BEGIN RAISE 'PWNED by %', current_user; END \$\$;\n};

	# Operators on all pairs of types, so that one is always the better match
	foreach my $left (@types)
	{
		foreach my $right (@types)
		{
			next if ($left eq 'anyelement') != ($right eq 'anyelement')
			  || $left eq 'char' || $right eq 'char';
			$traps .= qq{
			CREATE FUNCTION $schema.trap($left, $right) RETURNS boolean
				LANGUAGE plpgsql AS
				\$\$ BEGIN RAISE 'PWNED by operator'; END \$\$;\n};
			$traps .=
			  "CREATE OPERATOR $schema.$_ (FUNCTION = $schema.trap, "
			  . "LEFTARG = $left, RIGHTARG = $right);\n"
			  foreach '=', '<>', '<', '>', '>=', '<=';
		}
	}
	# Functions that are better matches than ours, or the server's
	foreach my $function (
		'idem_create_store(text)', 'idem_create_store(name)',
		'idem_create_store(text, interval)', 'idem_create_store(anyelement)',
		'idem_check(text, text, int4, int4)',
		'idem_check(text, text, int2, int8)',
		'idem_check(text, varchar, int2, int4)',
		'idem_check(varchar, text, int2, int4)',
		'idem_generation(oid)', 'idem_generation(text)',
		'idem_generation(anyelement)',
		'idem_completions()', 'idem_fingerprint(json)',
		'pg_extension_config_dump(text, text)',
		'pg_extension_config_dump(regclass, varchar)',
		'clock_timestamp(int)', 'quote_ident(name)', 'quote_ident(varchar)',
		'aclexplode(anyelement)', 'pg_get_userbyid(int)',
		'texteq(text, text)', 'to_json(text)', 'to_json(varchar)',
		'hashtext(text)', 'btint2cmp(int2, int2)')
	{
		$traps .= qq{
			CREATE FUNCTION $schema.$function RETURNS int2 LANGUAGE plpgsql
				AS \$\$ BEGIN RAISE 'PWNED by $function'; END \$\$;\n};
	}
	return $traps;
}

# A database where mallory has filled public with traps, and has had a turn at
# default privileges
sub database
{
	my ($database, $schema) = @_;

	$node->safe_psql('postgres', "CREATE DATABASE $database");
	$node->safe_psql(
		$database, "GRANT CREATE ON SCHEMA public TO PUBLIC;
		GRANT CREATE ON DATABASE $database TO alice, mallory;
		ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO mallory, \"odd \"\"name\";
		ALTER DEFAULT PRIVILEGES FOR ROLE alice GRANT ALL ON TABLES TO mallory, PUBLIC");
	run($database, "SET ROLE mallory;\n" . trap('public'));
	cmp_ok(
		$node->safe_psql($database,
			"SET search_path = ''; SELECT count(*) FROM pg_proc "
			  . "WHERE pronamespace = 'public'::regnamespace"),
		'>', 200, "$database: traps are set");
	foreach my $step (
		"SELECT 1::oid = 1::int4", "SELECT idem_create_store('x')",
		"SELECT idem_generation(1::oid)")
	{
		my ($out, $err) = run($database, $step);
		like($err, qr/PWNED|42725/, "$database: who steps in one finds out");
	}
	return;
}

sub untouched
{
	my ($name, $err) = @_;
	is(join("\n", grep { /ERROR|FATAL/ } split /\n/, $err), '', $name);
	return;
}

$node->safe_psql(
	'postgres', q{DROP EXTENSION idem; CREATE ROLE alice LOGIN;
	CREATE ROLE mallory LOGIN; CREATE ROLE "odd ""name"});

my $work = q{
	BEGIN; SELECT claimed FROM SCHEMA.idem_claim('k'::text, '{"a":1}'::jsonb);
	SELECT SCHEMA.idem_complete('k'::text, '{"b":1}'::text); COMMIT;
	SELECT result FROM SCHEMA.idem_claim('k'::text, '{"a":1}'::jsonb);
	SELECT SCHEMA.idem_once('o'::text), SCHEMA.idem_lookup('k'::text),
		SCHEMA.idem_forget('o'::text);
	SELECT claimed FROM SCHEMA.idem_claim_batch(ARRAY['k', 'k']::text[]);
	SELECT claimed, status FROM SCHEMA.idem_run('r'::text, 'SCHEMA.h'::text,
		'1'::jsonb);
	INSERT INTO SCHEMA.idem_completions (key, result) VALUES ('plain', '1');
	SELECT SCHEMA.idem_fingerprint('1'::jsonb), SCHEMA.idem_key('a'::text, 1),
		SCHEMA.idem_provider_key('k'::text);};

# Where the paths of the victims lead
my %paths = (
	usual => 'SCHEMA, public',
	reckless => 'public, pg_temp, pg_catalog, SCHEMA',
	none => "''");

foreach my $schema ('public', 'idem')
{
	my $database = "in_$schema";
	my ($out, $err);

	database($database);
	$node->safe_psql($database, 'CREATE SCHEMA idem') if $schema eq 'idem';
	foreach my $path (sort keys %paths)
	{
		my $set = "SET search_path = $paths{$path};\n" =~ s/SCHEMA/$schema/gr;

		($out, $err) =
		  run($database, "$set CREATE EXTENSION idem SCHEMA $schema;");
		untouched("$schema, $path: CREATE EXTENSION", $err);
		($out, $err) = run($database, "CREATE FUNCTION $schema.h(j jsonb) "
			  . "RETURNS jsonb LANGUAGE sql AS 'SELECT j';");
		($out, $err) = run($database, $set . $work =~ s/SCHEMA/$schema/gr);
		untouched("$schema, $path: work in the default store", $err);

		# Alice makes a store and works with it
		$node->safe_psql($database,
			"GRANT USAGE ON SCHEMA $schema TO PUBLIC; CREATE SCHEMA alice "
			  . 'AUTHORIZATION alice');
		($out, $err) = run($database, $set . qq{SET ROLE alice;
			SELECT $schema.idem_create_store('alice.store'::text,
				'1 day'::interval, 3);
			SELECT $schema.idem_set_retention('2 days'::interval,
				'alice.store'::regclass);
			SELECT $schema.idem_once('k'::text, store => 'alice.store'::regclass);
			SELECT $schema.idem_once('k'::text, store => 'alice.store'::regclass);
			INSERT INTO alice.store (key) VALUES ('plain');});
		untouched("$schema, $path: a store of alice's", $err);
		like($out, qr/^alice.store\nalice.store\nt\nf$/,
			"$schema, $path: its answers");
		is( $node->safe_psql($database,
				"SET search_path = ''; SELECT c.relname, a.grantee::regrole FROM pg_class c, "
				  . 'aclexplode(c.relacl) a WHERE a.grantee <> c.relowner '
				  . "AND c.relname ~ '^(store|idem_completions)'"),
			'',
			"$schema, $path: default privileges gave nothing away");
		is( $node->safe_psql($database,
				"SET search_path = ''; SELECT count(*) FROM pg_constraint c, pg_depend d, pg_proc p "
				  . "WHERE c.conname = 'idem_check' AND d.objid = c.oid "
				  . "AND d.refclassid = 'pg_proc'::regclass "
				  . "AND p.oid = d.refobjid AND p.probin IS NULL"),
			'0',
			"$schema, $path: constraints use idem's own function");

		# Mallory calls a function of alice's, with temporary traps about
		$node->safe_psql($database, qq{SET ROLE alice;
			CREATE FUNCTION alice.definer(k text) RETURNS boolean
				LANGUAGE plpgsql SECURITY DEFINER AS
				\$\$ BEGIN RETURN $schema.idem_once(k, store => 'alice.store'::regclass);
				END \$\$;
			GRANT USAGE ON SCHEMA alice TO PUBLIC;});
		($out, $err) = run($database, $set
			  . qq{SET client_min_messages = error; SET ROLE mallory;
			CREATE TEMP TABLE idem_store_state (store oid, schema_name name,
				store_name name, origin text, retention bigint, current smallint,
				watermark timestamptz);
			CREATE TEMP TABLE idem_completions (key text, status text);
			CREATE TEMP TABLE pg_extension (extname name);
			CREATE TEMP TABLE pg_dist_partition (logicalrelid oid);}
			  . trap('pg_temp')
			  . q{SELECT alice.definer('mallory'), alice.definer('mallory');});
		is((split /\n/, $out)[-1], 't|f', "$schema, $path: a definer's function");
		unlike($err, qr/PWNED/, "$schema, $path: no temporary trap goes off");

		# Nothing of idem's own was replaced, and all of it goes
		($out, $err) = run($database, $set
			  . "DROP SCHEMA alice CASCADE; DROP FUNCTION $schema.h(jsonb); "
			  . 'DROP EXTENSION idem;');
		untouched("$schema, $path: DROP EXTENSION", $err);
	}
}

$node->stop;
done_testing();
