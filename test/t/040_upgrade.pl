# An upgraded database equals a new one.
#
# Objects of the oldest version's script, plus the scripts that upgrade it, are
# compared with those of an installation; and no two versions may declare a C
# function differently, for a library does not know by whom it is called.  Both
# rules are tried on versions that do not exist, with differences planted.

use strict;
use warnings;

use Test::More;

use Idem;
use Installation;

#
# What is compared
#

# All that can be said of the extension's objects, and of what belongs to them,
# a line each.  Positions of columns count: the library goes by them.
my $objects_sql = q{
WITH member AS (
	SELECT d.classid, d.objid FROM pg_depend d
	WHERE d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass
		AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem')
), relation AS (
	SELECT c.* FROM pg_class c
	WHERE c.oid IN (SELECT objid FROM member WHERE classid = 'pg_class'::regclass)
		OR c.oid IN (SELECT indexrelid FROM pg_index JOIN member ON objid = indrelid)
		OR c.oid IN (SELECT t.typrelid FROM pg_type t JOIN member ON objid = t.oid)
), line AS (
	SELECT format('member %s, %s', pg_describe_object(classid, objid, 0),
		obj_description(objid, (SELECT relname FROM pg_class WHERE oid = classid)))
	FROM member
	UNION ALL
	SELECT format('function %s owned by %s, for %s', pg_get_functiondef(oid),
		proowner::regrole, ARRAY(SELECT unnest(proacl)::text ORDER BY 1) || (proacl IS NULL)::text)
	FROM pg_proc WHERE oid IN (SELECT objid FROM member WHERE classid = 'pg_proc'::regclass)
	UNION ALL
	SELECT format('relation %s kind %s owned by %s, for %s, %s %s %s, %s, partition %s %s', oid::regclass,
		relkind, relowner::regrole, ARRAY(SELECT unnest(relacl)::text ORDER BY 1) || (relacl IS NULL)::text,
		relpersistence, relreplident, reloptions, relispartition,
		pg_get_expr(relpartbound, oid), pg_get_partkeydef(oid))
	FROM relation
	UNION ALL
	SELECT format('column %s %s %s %s, %s %s %s %s, default %s, for %s: %s', attrelid::regclass,
		attnum, attname, CASE WHEN NOT attisdropped THEN format_type(atttypid, atttypmod) END,
		attnotnull, attidentity, attstorage, CASE WHEN attcollation <> 0 THEN attcollation::regcollation END,
		(SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = attrelid AND adnum = attnum),
		attacl, col_description(attrelid, attnum))
	FROM pg_attribute WHERE attrelid IN (SELECT oid FROM relation) AND attnum > 0
	UNION ALL
	SELECT format('view %s %s', oid::regclass, pg_get_viewdef(oid)) FROM relation WHERE relkind = 'v'
	UNION ALL
	SELECT format('index %s %s %s %s', indexrelid::regclass, pg_get_indexdef(indexrelid), indisvalid, indisreplident)
	FROM pg_index WHERE indrelid IN (SELECT oid FROM relation)
	UNION ALL
	SELECT format('constraint %s %s %s', conrelid::regclass, conname, pg_get_constraintdef(oid))
	FROM pg_constraint WHERE conrelid IN (SELECT oid FROM relation)
	UNION ALL
	SELECT format('trigger %s', pg_get_triggerdef(oid)) FROM pg_trigger WHERE tgrelid IN (SELECT oid FROM relation)
	UNION ALL
	SELECT format('rule %s', pg_get_ruledef(oid)) FROM pg_rewrite
	WHERE ev_class IN (SELECT oid FROM relation WHERE relkind <> 'v')
	UNION ALL
	SELECT format('sequence %s %s %s %s %s %s %s %s', seqrelid::regclass, seqtypid::regtype, seqstart,
		seqincrement, seqmin, seqmax, seqcache, seqcycle)
	FROM pg_sequence WHERE seqrelid IN (SELECT oid FROM relation)
	UNION ALL
	SELECT format('dumped %s %s', t::regclass, extcondition[n])
	FROM pg_extension, unnest(extconfig) WITH ORDINALITY AS config (t, n) WHERE extname = 'idem'
	UNION ALL
	SELECT format('extension %s %s %s', extversion, extnamespace::regnamespace, extrelocatable)
	FROM pg_extension WHERE extname = 'idem'
) SELECT replace(format, E'\n', ' ') FROM line};

# Of each C function, by its name in the library: arguments and result, with
# the columns where that is a row.
my $signatures_sql = q{
SELECT p.prosrc || ': ' || concat_ws(', ', p.oid::regprocedure::text, p.prorettype::regtype, p.proretset,
	p.proallargtypes::regtype[]::text, (SELECT string_agg(format('%s %s', attname, format_type(atttypid, atttypmod)), ', ' ORDER BY attnum)
		FROM pg_attribute a JOIN pg_type t ON t.typrelid = a.attrelid WHERE t.oid = p.prorettype AND attnum > 0))
FROM pg_proc p WHERE p.probin = '$libdir/idem' ORDER BY 1};

# Lines of one list only
sub differences
{
	my ($before, $after) = @_;
	my (%before, %after);
	@before{ split /\n/, $before } = ();
	@after{ split /\n/, $after } = ();
	return (
		(map { "- $_" } grep { !exists $after{$_} } sort keys %before),
		(map { "+ $_" } grep { !exists $before{$_} } sort keys %after));
}

# Names that two versions give to different functions
sub redeclared
{
	my ($one, $other) = @_;
	my %one = map { /^(\w+): (.*)/ } split /\n/, $one;
	my %other = map { /^(\w+): (.*)/ } split /\n/, $other;
	return grep { exists $other{$_} && $other{$_} ne $one{$_} } sort keys %one;
}

my $update = 'ALTER EXTENSION idem UPDATE';
my $installation = installation('idem');
my $node = start_node('main', $installation);

# What a query says of a version, and that perhaps updated.
sub ask
{
	my ($query, $version, @then) = @_;
	my $create = 'CREATE EXTENSION idem' . ($version ? " VERSION '$version'" : '');

	return $node->safe_psql('postgres', join ";\n", 'BEGIN',
		'SET client_min_messages = warning', $create, @then, $query, 'ROLLBACK');
}

my $new_objects = ask($objects_sql);
my $new_signatures = ask($signatures_sql);

sub objects_differ
{
	return differences($new_objects, ask($objects_sql, @_));
}

cmp_ok(($new_objects =~ tr/\n//), '>', 200, 'there is much to compare');
cmp_ok(($new_signatures =~ tr/\n//), '>', 20, 'and many C functions');
is(join("\n", objects_differ(undef)), '', 'two installations are equal');

my @versions = split /\n/, $node->safe_psql('postgres',
	q{SELECT version FROM pg_available_extension_versions WHERE name = 'idem' ORDER BY 1});
my $oldest = first_version();
ok((grep { $_ eq $oldest } @versions), "there is a script of version $oldest");

foreach my $version (@versions)
{
	is(join("\n", redeclared(ask($signatures_sql, $version), $new_signatures)),
		'', "version $version and ours declare no C function differently");
	is(join("\n", objects_differ($version, $update)),
		'', "version $version, updated, equals an installation");
}

# A version before the first one, which lacks this and that, and its update
my $script = first_script();
my $before = $script;
my $upgrade = "\\echo Use \"$update\" to load this file. \\quit\n";
foreach my $pattern (
	qr/CREATE FUNCTION idem_extend\(.*?;\n\nCOMMENT .*?;\n/s,
	qr/COMMENT ON VIEW idem_uncertain .*?;\n/s,
	qr/CREATE FUNCTION idem_fingerprint\(.*?;\n\nCOMMENT .*?;\n/s)
{
	$upgrade .= part($before, $pattern);
	$before = edited($before, $pattern, '');
}
put_script($installation, '0.1', $before);
put_script($installation, "0.1--$oldest", $upgrade);
my @lacks = objects_differ('0.1');
is((grep { /idem_extend|idem_fingerprint|member view idem_uncertain/ } @lacks),
	6, 'an earlier version differs');
is(join("\n", objects_differ('0.1', $update)),
	'', 'its update leaves no difference');

# Updates that forget something, or do too much, are found out
my @planted = (
	'ALTER FUNCTION idem_forget(text, regclass) STABLE',
	'ALTER FUNCTION idem_forget(text, regclass) PARALLEL SAFE',
	'ALTER FUNCTION idem_forget(text, regclass) COST 100',
	'ALTER FUNCTION idem_lookup(text, regclass) ROWS 2',
	'ALTER FUNCTION idem_fingerprint(jsonb) CALLED ON NULL INPUT',
	'ALTER FUNCTION idem_forget(text, regclass) SECURITY DEFINER',
	'ALTER FUNCTION idem_forget(text, regclass) SET search_path = public',
	'ALTER FUNCTION idem_forget(text, regclass) OWNER TO pg_monitor',
	'REVOKE EXECUTE ON FUNCTION idem_forget(text, regclass) FROM PUBLIC',
	q{CREATE OR REPLACE FUNCTION idem_forget(key text, store regclass DEFAULT 'idem_store_state')
		RETURNS boolean AS 'MODULE_PATHNAME', 'idem_forget' LANGUAGE C COST 1000},
	q{CREATE OR REPLACE FUNCTION idem_forget(key text, store regclass DEFAULT 'idem_completions')
		RETURNS boolean AS 'MODULE_PATHNAME', 'idem_release' LANGUAGE C COST 1000},
	'COMMENT ON FUNCTION idem_forget(text, regclass) IS NULL',
	'COMMENT ON COLUMN idem_completion.key IS NULL',
	q{COMMENT ON TYPE idem_outcome IS 'another'},
	'DROP FUNCTION idem_forget(text, regclass)',
	'CREATE FUNCTION idem_more() RETURNS int LANGUAGE sql RETURN 1',
	'ALTER EXTENSION idem DROP FUNCTION idem_forget(text, regclass)',
	'GRANT SELECT ON idem_completions TO PUBLIC',
	'GRANT SELECT ON idem_completions_1 TO PUBLIC',
	'REVOKE SELECT ON idem_stores FROM PUBLIC',
	'ALTER TABLE idem_store_state OWNER TO pg_monitor',
	'ALTER TABLE idem_store_state ADD COLUMN extra int',
	'ALTER TABLE idem_store_state ADD extra int; ALTER TABLE idem_store_state DROP extra',
	'ALTER TABLE idem_store_state ALTER current SET DEFAULT 1',
	'ALTER TABLE idem_store_state ALTER origin DROP NOT NULL',
	'ALTER TABLE idem_store_state REPLICA IDENTITY DEFAULT',
	'ALTER TABLE idem_store_state SET (fillfactor = 50)',
	'ALTER TABLE idem_store_state SET UNLOGGED',
	'ALTER TABLE idem_completions_1 ALTER result SET STORAGE EXTERNAL',
	'ALTER TABLE idem_completions DROP CONSTRAINT idem_check',
	'CREATE INDEX ON idem_completions_2 (token)',
	'CREATE RULE more AS ON INSERT TO idem_store_state DO ALSO NOTHING',
	'CREATE TRIGGER more BEFORE UPDATE ON idem_store_state EXECUTE FUNCTION suppress_redundant_updates_trigger()',
	'ALTER SEQUENCE idem_token_seq CACHE 10',
	'ALTER TYPE idem_outcome RENAME ATTRIBUTE token TO tokens',
	'ALTER VIEW idem_uncertain SET (security_barrier)',
	q{CREATE OR REPLACE VIEW idem_more AS SELECT 1},
	q{SELECT pg_extension_config_dump('idem_token_seq', 'WHERE false')});
foreach my $sql (@planted)
{
	put_script($installation, "0.1--$oldest", "$upgrade$sql;\n");
	my @found = objects_differ('0.1', $update);
	ok(@found > 0, 'found: ' . $sql =~ s/\s+/ /gr);
	note(join "\n", @found);
}

# So is a C function that another version has declared differently
my %edits = (
	idem_extend => [ qr/lease interval, store/, 'span interval, more int, store' ],
	idem_release => [
		qr/RETURNS boolean\nAS 'MODULE_PATHNAME', 'idem_release'/,
		"RETURNS integer\nAS 'MODULE_PATHNAME', 'idem_release'"
	],
	idem_claim => [
		qr/jsonb\n\);\n\nCOMMENT ON TYPE idem_outcome/,
		"jsonb,\n\tmore text\n);\n\nCOMMENT ON TYPE idem_outcome"
	],
	idem_claim_batch => [
		qr/checkpoint jsonb\)\nAS 'MODULE_PATHNAME', 'idem_claim_batch'/,
		"checkpoint json)\nAS 'MODULE_PATHNAME', 'idem_claim_batch'"
	]);
my $uncommented = edited($script, qr/COMMENT ON FUNCTION.*?;\n/s, '');
foreach my $name (sort keys %edits)
{
	put_script($installation, '0.2', edited($uncommented, @{ $edits{$name} }));
	my @found = redeclared(ask($signatures_sql, '0.2'), $new_signatures);
	ok((grep { $_ eq $name } @found), "found: another $name");
	note("@found");
}
$node->stop;

done_testing();
