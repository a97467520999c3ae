# Surroundings that must not matter: collations, encodings, settings,
# search_path, parallel plans, advisory locks of users, languages.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $node = idem_node('main',
	init => { extra => [ '--encoding=UTF8', '--locale=C' ] });
my $parallel =
  $node->pg_version >= 16 ? 'debug_parallel_query' : 'force_parallel_mode';

sub sql
{
	my ($sql, $database) = @_;
	return $node->safe_psql($database // 'postgres', $sql);
}

sub error_of
{
	my ($sql, $database) = @_;
	my ($rc, $out, $err) = $node->psql($database // 'postgres',
		"\\set VERBOSITY verbose\n$sql");
	return $err;
}

# Keys that some collation or other takes for equal, in octets of UTF-8
my @alike = (
	'key', 'Key', 'KEY', 'key ', ' key', "k\xc3\xa9y", "ke\xcc\x81y",
	"\xe2\x84\xaa" . 'ey', "str\xc3\x9fe", 'strsse',
	"\xef\xbd\x8b" . 'ey', "k\xe2\x80\x8bey", "i\xc4\xb0", "ii");
my $alike = join(', ', map { "'$_'" } @alike);

sub keys_are_different
{
	my ($name, $database, $collate, $store) = @_;
	my $n = @alike;
	my $keys = "unnest(ARRAY[$alike] $collate) k";

	is( sql("SELECT count(*) FROM $keys WHERE "
			  . "idem_once(k $collate, store => '$store')", $database),
		$n, "$name: $n different keys");
	is( sql("SELECT count(*) FROM $keys WHERE "
			  . "idem_once(k $collate, store => '$store')", $database),
		'0', "$name: the same keys again");
	is( sql("SELECT count(*), bool_and(NOT claimed) FROM "
			  . "idem_claim_batch(ARRAY[$alike] $collate, store => '$store')",
			$database),
		"$n|t", "$name: in a batch");
	is( sql("SELECT idem_forget('Key' $collate, store => '$store'); "
			  . "SELECT string_agg(k, ',') FROM $keys WHERE NOT EXISTS "
			  . "(SELECT FROM idem_lookup(k $collate, '$store'))", $database),
		"t\nKey", "$name: one forgotten, the others not");
	is( sql("BEGIN; SELECT claimed FROM idem_claim('Key' $collate, "
			  . "store => '$store'); "
			  . "SELECT status FROM idem_try_claim('key' $collate, "
			  . "store => '$store'), "
			  . "idem_release('KEY' $collate, store => '$store') r WHERE NOT r; "
			  . "SELECT idem_release('Key' $collate, store => '$store'); "
			  . 'COMMIT', $database),
		"t\ncompleted\nt", "$name: claims of one transaction");
	return;
}

# Collations

my $have_icu = sql(q{SELECT count(*) > 0 FROM pg_collation
	WHERE collprovider = 'i'}) eq 't';
diag('this PostgreSQL was built without ICU: deterministic collations only')
  unless $have_icu;

keys_are_different('default collation', 'postgres', '', 'idem_completions');
if ($have_icu)
{
	sql(q{CREATE DATABASE icu TEMPLATE template0 ENCODING 'UTF8'
		LOCALE_PROVIDER icu ICU_LOCALE 'und-u-ks-level1' LOCALE 'C'});
	sql(q{CREATE EXTENSION idem;
		CREATE COLLATION nd (provider = icu, locale = 'und-u-ks-level1-ka-shifted',
			deterministic = false);
		CREATE DOMAIN loose AS text COLLATE nd;
		SELECT idem_create_store('"Gro" ');}, 'icu');
	is(sql(q{SELECT 'KEY ' = 'key' COLLATE nd, 'KEY' = 'key'}, 'icu'),
		't|f', 'the collation is nondeterministic');
	keys_are_different('database with ICU', 'icu', '', 'idem_completions');
	keys_are_different('nondeterministic', 'icu', 'COLLATE nd', '"Gro" ');
	sql(q{CREATE TABLE job (key loose, name text COLLATE nd);
		INSERT INTO job VALUES ('x', 'X'), ('X', 'x '), ('x ', 'x');
		SELECT idem_once(key) FROM job}, 'icu');
	is(sql(q{SELECT count(*) FROM job, idem_lookup(name)}, 'icu'),
		'3', 'columns with a nondeterministic collation');
	is( sql(q{SELECT count(*) FROM job j JOIN idem_completions c
			ON c.key = j.key COLLATE "C"}, 'icu'),
		'3', 'a join on the stored key compares bytes');
}

# A store whose key has another collation is none

if ($have_icu)
{
	foreach my $collation ('"und-x-icu"', 'nd')
	{
		sql(qq{DROP TABLE IF EXISTS wrong; SELECT idem_create_store('wrong');
			ALTER TABLE wrong DROP CONSTRAINT idem_check;
			ALTER TABLE wrong ALTER COLUMN key TYPE text COLLATE $collation},
			'icu');
		like(error_of(q{SELECT idem_once('k', store => 'wrong')}, 'icu'),
			qr/ERROR:  42809:/, "a store with collation $collation is refused");
	}
}

# Encodings: one key, one request, whatever the bytes

my $hashes = q{SELECT idem_fingerprint('{"schlüssel":"wért","n":1.0}'),
	idem_provider_key('rechnung:ä', 'größe'),
	idem_key('ß', 'é:%')};
my %seen;
foreach my $encoding ('UTF8', 'LATIN1', 'LATIN9', 'WIN1252')
{
	my $database = lc $encoding . '_db';

	sql("CREATE DATABASE $database TEMPLATE template0 ENCODING '$encoding' "
		  . "LOCALE 'C'");
	sql(q{CREATE EXTENSION idem}, $database);
	$seen{ sql("SET client_encoding = 'UTF8'; $hashes", $database) }++;
	is( sql(q{SET client_encoding = 'UTF8';
		BEGIN; SELECT claimed FROM idem_claim('schlüssel', '{"a":"ö"}');
		SELECT idem_complete('schlüssel', '{"ü": "ß", "u":"\u00e9"}'); COMMIT;
		SELECT result FROM idem_claim('schlüssel', '{"a":"\u00f6"}');
		SELECT idem_once('SCHLÜSSEL');
		SELECT octet_length(key) FROM idem_lookup('schlüssel')}, $database),
		qq(t\n{"ü": "ß", "u":"\\u00e9"}\n{"ü": "ß", "u":"\\u00e9"}\nt\n)
		  . ($encoding eq 'UTF8' ? 10 : 9),
		"$encoding: claim, complete, replay");
	is( sql("SET client_encoding = 'UTF8'; SELECT idem_once(repeat('é', "
			  . ($encoding eq 'UTF8' ? 256 : 512) . '))', $database),
		't', "$encoding: 512 bytes");
	like( error_of("SET client_encoding = 'UTF8'; SELECT idem_once(repeat('é', "
			  . ($encoding eq 'UTF8' ? 257 : 513) . '))', $database),
		qr/22023/, "$encoding: 513 bytes or more");
	like(error_of("SELECT idem_once(E'a\\x07')", $database),
		qr/22023/, "$encoding: a control character");
}
is(scalar(keys %seen), 1, 'fingerprints and keys are the same in all encodings');
like(error_of(q{SET client_encoding = 'UTF8'; SELECT idem_once(E'a\xff')}),
	qr/22021/, 'a key that is not UTF-8 is refused');

sql("CREATE DATABASE ascii TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'");
sql('CREATE EXTENSION idem', 'ascii');
keys_are_different('SQL_ASCII', 'ascii', '', 'idem_completions');
is( sql(q{SELECT idem_once(E'\xff\xfe'), idem_once(E'\xff'), idem_once(E'\xff\xfe')},
		'ascii'),
	't|t|f', 'SQL_ASCII: any bytes');
is( sql(q{BEGIN; SELECT claimed FROM idem_claim(E'\xc3', '{"a":"ö"}');
	SELECT idem_complete(E'\xc3', '"ö"'); COMMIT;
	SELECT result FROM idem_claim(E'\xc3', '{"a":"ö"}')}, 'ascii'),
	qq(t\n"ö"\n"ö"), 'SQL_ASCII: request and result');

# Settings of the session

my $settings = q{
	SET DateStyle = 'SQL, DMY'; SET IntervalStyle = 'sql_standard';
	SET TimeZone = 'Pacific/Apia'; SET extra_float_digits = -15;
	SET bytea_output = 'escape'; SET quote_all_identifiers = on;
	SET transform_null_equals = on; SET array_nulls = off;
	SET check_function_bodies = off; SET default_toast_compression = 'pglz';
	SET enable_indexscan = off; SET enable_indexonlyscan = off;
	SET enable_bitmapscan = off; SET work_mem = '64kB';
	SET row_security = off; SET jit_above_cost = 0; SET jit = on;
	SET idem.wait_timeout = '1s'; SET search_path = '';
	SET synchronize_seqscans = off; SET lock_timeout = '5s';
	SET standard_conforming_strings = off; SET escape_string_warning = off;};
is( sql($settings . q{
	SELECT public.idem_create_store('public.odd\\\\name', '1 02:03:04', 2);
	BEGIN; SELECT claimed FROM public.idem_claim('k', '1.10', store => 'public.odd\\\\name');
	SELECT public.idem_complete('k', '1.10', store => 'public.odd\\\\name'); COMMIT;
	SELECT claimed, result FROM public.idem_claim('k', '1.1', store => 'public.odd\\\\name');
	SELECT public.idem_set_retention('2 days', 'public.odd\\\\name');
	SELECT retention FROM public.idem_store_state}),
	qq{"public"."odd\\name"\nt\n1.10\nf|1.10\n"public"."odd\\name"\n172800},
	'odd settings');

# Parallel plans

is( sql(q{SELECT string_agg(DISTINCT proname, ' ') FROM pg_proc
		WHERE proname ~ '^idem_' AND (proparallel = 'u') <> (provolatile = 'v')}),
	'', 'what is volatile is parallel unsafe');
sql(q{CREATE TABLE wide AS SELECT n FROM generate_series(1, 2000) n;
	ANALYZE wide;
	CREATE FUNCTION mislabelled(k text) RETURNS boolean LANGUAGE plpgsql
		PARALLEL SAFE AS 'BEGIN RETURN idem_once(k); END';
	CREATE FUNCTION mislabelled_sql(k text) RETURNS text LANGUAGE sql
		PARALLEL SAFE AS $$ SELECT status FROM public.idem_try_claim(k) $$});
my $eager = "SET $parallel = on; SET parallel_setup_cost = 0; "
  . 'SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0; ';
unlike(sql("$eager EXPLAIN (COSTS OFF) SELECT idem_once('p' || n) FROM wide"),
	qr/Gather/, 'no parallel plan');
is(sql("$eager SELECT count(*) FROM wide WHERE idem_once('p' || n)"),
	'2000', 'no parallel plan, all claimed');
is(sql("$eager SELECT count(*) FROM wide WHERE idem_once('p' || n)"),
	'0', 'no parallel plan, all replayed');
like(error_of("$eager SELECT mislabelled('q' || n) FROM wide"),
	qr/ERROR:  25000:/, 'a claim in a worker is an error');
like(error_of("$eager SELECT mislabelled('p' || n) FROM wide"),
	qr/ERROR:  25000:/, 'a replay in a worker is an error');
like(error_of("$eager SELECT count(mislabelled_sql('p' || n)) FROM wide"),
	qr/ERROR:  25000:|^$/, 'an inlined claim is not run in a worker');
is(sql(q{SELECT count(*) FROM wide, idem_lookup('q' || n)}),
	'0', 'nothing was claimed there');
like(sql("$eager EXPLAIN (COSTS OFF) SELECT count(*) FROM wide, "
		  . "idem_lookup('p' || n)"),
	qr/Gather/, 'look-ups may be in a parallel plan');
is(sql("$eager SELECT count(*) FROM wide, idem_lookup('p' || n)"),
	'2000', 'look-ups in a parallel plan');
is( sql("$eager BEGIN; SELECT idem_once('own'); "
		  . "SELECT count(*) FROM wide, idem_lookup('own') WHERE n < 11; COMMIT"),
	"t\n10", 'look-ups in a parallel plan see own records');

# Advisory locks of users

{
	my $claimer = session($node);
	my $user = session($node);

	$claimer->query(q{BEGIN; SELECT claimed FROM idem_claim('locked')});
	my ($class, $object, $sub) = split /\|/,
	  sql("SELECT classid, objid, objsubid FROM pg_locks "
		  . "WHERE locktype = 'advisory' AND pid = ${\ $claimer->pid}");
	my $both = "('x' || lpad(to_hex(${class}::bigint), 8, '0') "
	  . "|| lpad(to_hex(${object}::bigint), 8, '0'))::bit(64)::bigint";
	my $high = "('x' || lpad(to_hex(${class}::bigint), 8, '0'))::bit(32)::int";
	my $low = "('x' || lpad(to_hex(${object}::bigint), 8, '0'))::bit(32)::int";

	is($sub, 0x4944, 'the class of the lock');
	is( $user->query("SELECT pg_try_advisory_lock($both), "
			  . "pg_try_advisory_lock($high, $low), "
			  . "pg_try_advisory_lock_shared($both)"),
		't|t|t', 'a user locks the same numbers');
	is( sql("SELECT count(DISTINCT objsubid) FROM pg_locks WHERE "
			  . "locktype = 'advisory' AND classid = $class AND objid = $object"),
		'3', 'they are the same numbers');
	is( $claimer->query("SELECT idem_complete('locked', '1'); COMMIT; "
			  . "SELECT claimed FROM idem_claim('locked')"),
		"1\nf", 'and the claim goes on');
	is( $claimer->query(q{BEGIN; SELECT idem_forget('locked');
			SELECT claimed FROM idem_claim('locked')}),
		"t\nt", 'also with the user there first');
	is( $claimer->query("SET client_min_messages = error; "
			  . "SELECT pg_advisory_unlock($both), "
			  . "pg_advisory_unlock($high, $low); "
			  . 'SELECT pg_advisory_unlock_all()'),
		"f|f\n", 'unlocking them');
	is(sql(q{SELECT status FROM idem_try_claim('locked')}),
		'in_progress', 'does not unlock the claim');
	is($claimer->query(q{SELECT idem_complete('locked', '2'); COMMIT}),
		'2', 'which is completed');
	$_->quit foreach $claimer, $user;
}

# SERIALIZABLE: different keys do not conflict, and leave no SIREAD locks

{
	my @sessions = map { session($node) } 1 .. 3;

	$_->query('BEGIN ISOLATION LEVEL SERIALIZABLE') foreach @sessions;
	foreach my $i (0 .. 2)
	{
		$sessions[$i]->query("SELECT claimed FROM idem_claim('ssi$i'); "
			  . "SELECT status FROM idem_try_claim('own')");
	}
	foreach my $i (0 .. 2)
	{
		$sessions[$i]->query("SELECT idem_complete('ssi$i'); "
			  . "SELECT idem_once('ssi$i more')");
	}
	is( sql(q{SELECT count(*) FROM pg_locks WHERE mode = 'SIReadLock'
			AND relation::regclass::text LIKE 'idem_completions%'}),
		'0', 'no SIREAD locks on a store');
	$_->query('COMMIT') foreach @sessions;
	is(sql(q{SELECT count(*) FROM idem_completions WHERE key LIKE 'ssi%'}),
		'6', 'no conflicts');
	$_->quit foreach @sessions;
}

# Another language

my ($language) = grep { /^(de|es|fr|ja|ru)_.*utf-?8/i } split /\n/,
  `locale -a 2>/dev/null`;
diag('no locale of another language here: messages are in English only')
  unless $language;
if ($language)
{
	my $foreign = session($node);

	$foreign->query("SET lc_messages = '$language'");
	like($foreign->error('SELECT 1/0'), qr/22012/, "lc_messages: $language");
	$foreign->query(q{BEGIN; SELECT claimed FROM idem_claim('l', '1');
		SELECT idem_complete('l', '1'); COMMIT});
	like($foreign->error(q{SELECT idem_claim('l', '2')}),
		qr/ID001/, 'lc_messages: ID001');
	$foreign->query(q{BEGIN; INSERT INTO idem_completions (key) VALUES ('i')});
	is( sql("SET lc_messages = '$language'; "
			  . q{SELECT status FROM idem_try_claim('i', wait => '10ms')}),
		'in_progress', 'lc_messages: a wait that runs out');
	$foreign->query('COMMIT');
	like($foreign->error(q{SELECT idem_claim('alone')}),
		qr/ID006/, 'lc_messages: ID006');
}

$node->stop;
done_testing();
