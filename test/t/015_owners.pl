# Whatever owners do to their stores while the worker runs: expiry goes on
# where it can, says once where it cannot, disturbs no other store, and runs
# nothing of theirs with more rights than their own.

use strict;
use warnings;

use PostgreSQL::Test::Utils;
use Test::More;

use Idem;

my $node = idem_node(
	'main',
	preload => 1,
	conf => q{
idem.naptime = 1
log_statement = none
log_line_prefix = '%m [%p] %b '
});

# Set where the database's search_path leads a superuser into a trap
my $careful = '';

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', "$careful $sql");
}

# In a session that was never anybody else's
sub as
{
	my ($role, $sql) = @_;
	return $node->safe_psql('postgres', $sql, extra_params => [ '-U', $role ]);
}

sub await
{
	my ($query, $what) = @_;
	$node->poll_query_until('postgres', $query) or die "never: $what";
	return;
}

my $superuser = sql('SELECT current_user');

# A record is put there by the store's owner, and goes when it is old enough.
my $number = 0;

sub put
{
	my ($role, $store) = @_;
	my $key = 'k' . ++$number;
	as($role, "INSERT INTO $store (key) VALUES ('$key')");
	return $key;
}

sub expires
{
	my ($role, $store, $what) = @_;
	my $key = put($role, $store);
	await("SELECT count(*) = 0 FROM $store WHERE key = '$key'",
		"$what: $store expires");
	pass("$what: $store expires");
	return;
}

# How often expiry of a store was said to be impossible
sub warnings_of
{
	my ($store) = @_;
	my $log = slurp_file($node->logfile);
	my $count = () = $log =~ /idem worker WARNING:  expiry of store \Q$store\E cannot/g;
	return $count;
}

sub trouble_of
{
	my ($store) = @_;
	return sql("SELECT coalesce(trouble, 'none') FROM idem_store_status('$store')");
}

# Expiry of a store cannot go on, which is said once; that of another can.
sub is_stuck
{
	my ($store, $pattern, $what) = @_;
	my $before = warnings_of($store);

	await("SELECT trouble IS NOT NULL FROM idem_store_status('$store')",
		"$what: trouble");
	like(trouble_of($store), $pattern, "$what: idem_stores says why");
	expires('alice', 'alice.innocent', $what);
	is(warnings_of($store), $before + 1, "$what: one warning");
	return;
}

sub is_well
{
	my ($store, $what) = @_;
	await("SELECT trouble IS NULL FROM idem_store_status('$store')",
		"$what: no trouble");
	return;
}

sql(q{
	CREATE ROLE alice LOGIN; CREATE ROLE bob LOGIN; CREATE ROLE mallory LOGIN;
	GRANT CREATE ON DATABASE postgres TO alice, bob, mallory;
	GRANT CREATE ON SCHEMA public TO mallory;
	CREATE SCHEMA alice AUTHORIZATION alice;
	CREATE SCHEMA bob AUTHORIZATION bob;
	CREATE SCHEMA mallory AUTHORIZATION mallory;
	GRANT USAGE ON SCHEMA alice TO bob, mallory;
	GRANT USAGE ON SCHEMA bob TO alice});
as('alice', q{SELECT idem_create_store('alice.innocent', '1 second', 2)});
expires('alice', 'alice.innocent', 'at first');

# Renamed, moved, given away

as('bob', q{SELECT idem_create_store('bob.s', '1 second', 2)});
as('bob', 'ALTER TABLE bob.s RENAME TO t');
sql('GRANT ALL ON SCHEMA alice TO bob');
as('bob', 'ALTER TABLE bob.t SET SCHEMA alice');
as('bob', q{SELECT idem_create_store('bob.s', '1 hour', 2);
	SELECT idem_once('stays', store => 'bob.s')});
expires('bob', 'alice.t', 'renamed and moved, another of the old name');
is(sql(q{SELECT count(*) FROM bob.s}), '1', 'which keeps its own records');

sql('ALTER TABLE alice.t OWNER TO alice');
put('alice', 'alice.t');
is_stuck('alice.t', qr/permission denied for table/, 'given away by half');
sql('ALTER TABLE bob.s_0 OWNER TO alice; ALTER TABLE bob.s_1 OWNER TO alice')
  if sql(q{SELECT 'bob.s_0'::regclass IN
	(SELECT inhrelid FROM pg_inherits WHERE inhparent = 'alice.t'::regclass)}) eq 't';
foreach my $partition (split /\n/,
	sql(q{SELECT inhrelid::regclass FROM pg_inherits
		WHERE inhparent = 'alice.t'::regclass}))
{
	sql("ALTER TABLE $partition OWNER TO alice");
}
is_well('alice.t', 'given away');
expires('alice', 'alice.t', 'given away');

# An owner who took TRUNCATE from itself

as('bob', q{SELECT idem_create_store('bob.kept', '1 second', 2);
	REVOKE TRUNCATE ON bob.kept_0, bob.kept_1 FROM bob;
	INSERT INTO bob.kept (key) VALUES ('stays')});
is_stuck('bob.kept', qr/permission denied for table/, 'no TRUNCATE');
is(sql('SELECT count(*) FROM bob.kept'), '1', 'no TRUNCATE: the record stays');
as('bob', 'GRANT TRUNCATE ON bob.kept_0, bob.kept_1 TO bob');
is_well('bob.kept', 'TRUNCATE again');
expires('bob', 'bob.kept', 'TRUNCATE again');

# Partitions that are away for a while

as('bob', q{SELECT idem_create_store('bob.ring', '1 second', 2)});
expires('bob', 'bob.ring', 'whole');
as('bob', 'ALTER TABLE bob.ring DETACH PARTITION bob.ring_1');
is_stuck('bob.ring', qr/cannot be used as a store/, 'detached');
as('bob', 'ALTER TABLE bob.ring ATTACH PARTITION bob.ring_1 FOR VALUES IN (1)');
is_well('bob.ring', 'attached');
expires('bob', 'bob.ring', 'attached');

# Dropped while a step waits for it

{
	my ($dropper, $expirer) = (session($node), session($node));

	sql(q{SELECT idem_create_store('gone_' || g, '1 second', 2)
		FROM generate_series(1, 30) g});
	sql("INSERT INTO gone_$_ (key) VALUES ('k')") foreach 1 .. 30;
	$dropper->query('BEGIN');
	$dropper->query("DROP TABLE gone_$_") foreach 1 .. 30;
	$expirer->send('CALL idem_expire()');
	$expirer->wait_blocked;
	$dropper->query('COMMIT');
	is($expirer->answer, '', 'stores dropped while a step waits for them');
	expires('alice', 'alice.innocent', 'stores dropped');
	is( sql(q{SELECT count(*) FROM idem_store_state
			WHERE store_name LIKE 'gone_%'}),
		'0',
		'and forgotten');
	$_->quit foreach $dropper, $expirer;
}
foreach my $i (1 .. 8)
{
	sql(q{SELECT idem_create_store('brief', '1 second', 2);
		INSERT INTO brief (key, completed_at, generation)
			VALUES ('a', now() - interval '1 hour', 0),
				('b', now() - interval '1 hour', 1)});
	sql('BEGIN; DROP TABLE brief; SELECT pg_sleep(0.05); COMMIT');
}
expires('alice', 'alice.innocent', 'stores that come and go');

# The extension goes and comes back; a store that outlived it is expired
# again when its retention is set

foreach my $i (1 .. 4)
{
	sql(q{INSERT INTO idem_completions (key) VALUES ('k');
		SELECT idem_set_retention('1 second')});
	sql(q{BEGIN; DROP EXTENSION idem CASCADE; SELECT pg_sleep(0.1); COMMIT});
	sql(q{BEGIN; CREATE EXTENSION idem; SELECT pg_sleep(0.1); COMMIT});
}
sql(q{SELECT idem_set_retention('1 second')});
expires($superuser, 'idem_completions', 'extension made anew');
is( sql(q{SELECT retention IS NULL FROM
		idem_store_status('alice.innocent')}),
	't', 'a store that outlived it does not expire by itself');
as('alice', q{SELECT idem_set_retention('1 second', 'alice.innocent');
	ALTER TABLE alice.innocent ALTER generation
		SET DEFAULT idem_generation('alice.innocent')});
expires('alice', 'alice.innocent', 'until its retention is set');

# A hostile owner.  Everything that can hold code calls attack(), which
# counts in sequences, since those do not roll back: where it was called,
# whether as a superuser, and whether anything that it tried made it one.

sub hostile
{
	my ($sql) = @_;
	return as('mallory', "SET search_path = mallory, public; $sql");
}

sub counted
{
	my ($name) = @_;
	return sql("SELECT CASE WHEN is_called THEN last_value ELSE 0 END "
		  . "FROM mallory.$name");
}

my @places = qw(before_truncate after_truncate row_trigger index_expression
  index_predicate check_constraint generated_column);

# What neither the extension nor mallory's own DDL has called
my @never = qw(operator rule deferred policy);

# What may be called or not
my @other = qw(column_default super escaped);

sql(q{
	ALTER DATABASE postgres SET search_path = mallory, public, pg_catalog;
	ALTER DATABASE postgres SET default_transaction_isolation = serializable});
$careful = 'SET search_path = pg_catalog, public;';
hostile("CREATE SEQUENCE $_") foreach @places, @never, @other;
hostile(
	q{
	CREATE TABLE trap (i int);
	CREATE TABLE armed ();
	CREATE FUNCTION attack(place text) RETURNS boolean
	LANGUAGE plpgsql VOLATILE AS $$
	DECLARE
		command text;
	BEGIN
		PERFORM pg_catalog.nextval(('mallory.' || place)::pg_catalog.regclass);
		IF (SELECT rolsuper FROM pg_catalog.pg_roles
				WHERE rolname OPERATOR(pg_catalog.=) current_user) THEN
			PERFORM pg_catalog.nextval('mallory.super');
		END IF;
		FOREACH command IN ARRAY ARRAY[
			'SET ROLE SUPERUSER', 'SET ROLE NONE', 'RESET ROLE',
			'SET SESSION AUTHORIZATION DEFAULT',
			'SET SESSION AUTHORIZATION SUPERUSER',
			'ALTER ROLE mallory CREATEROLE',
			'COPY (SELECT 1) TO PROGRAM ''true''',
			'SET session_replication_role = replica',
			'CREATE TEMP TABLE idem_store_state ()',
			'DECLARE c CURSOR WITH HOLD FOR SELECT mallory.attack(''deferred'')',
			'INSERT INTO mallory.trap VALUES (1)',
			'SET search_path = mallory, public',
			'SET lock_timeout = 0', 'SET statement_timeout = 0',
			'SET default_transaction_read_only = on',
			'SET default_transaction_isolation = serializable',
			'SET synchronous_commit = on', 'SET row_security = on']
		LOOP
			EXIT WHEN NOT EXISTS (SELECT FROM mallory.armed);
			BEGIN
				EXECUTE replace(command, 'SUPERUSER',
					pg_catalog.pg_get_userbyid(10));
			EXCEPTION WHEN OTHERS THEN
				NULL;
			END;
			IF (SELECT rolsuper FROM pg_catalog.pg_roles
					WHERE rolname OPERATOR(pg_catalog.=) current_user) THEN
				PERFORM pg_catalog.nextval('mallory.escaped');
			END IF;
		END LOOP;
		RETURN true;
	END $$;
	CREATE FUNCTION pure_attack(place text) RETURNS boolean
	LANGUAGE plpgsql IMMUTABLE AS $$
	BEGIN
		RETURN mallory.attack(place);
	END $$;
	CREATE FUNCTION attack_trigger() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM mallory.attack(TG_ARGV[0]);
		RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
	END $$;
	CREATE CONSTRAINT TRIGGER trap AFTER INSERT ON trap
		DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
		EXECUTE FUNCTION attack_trigger('deferred');

	-- what the search_path would find first
	CREATE FUNCTION equal(text, text) RETURNS boolean LANGUAGE sql IMMUTABLE
		AS $$ SELECT mallory.pure_attack('operator') $$;
	CREATE FUNCTION later(timestamptz, timestamptz) RETURNS boolean
		LANGUAGE sql IMMUTABLE AS $$ SELECT mallory.pure_attack('operator') $$;
	CREATE FUNCTION same(oid, oid) RETURNS boolean
		LANGUAGE sql IMMUTABLE AS $$ SELECT mallory.pure_attack('operator') $$;
	CREATE FUNCTION same(name, name) RETURNS boolean
		LANGUAGE sql IMMUTABLE AS $$ SELECT mallory.pure_attack('operator') $$;
	CREATE OPERATOR mallory.= (LEFTARG = text, RIGHTARG = text, FUNCTION = equal);
	CREATE OPERATOR mallory.> (LEFTARG = timestamptz, RIGHTARG = timestamptz,
		FUNCTION = later);
	CREATE OPERATOR mallory.= (LEFTARG = oid, RIGHTARG = oid, FUNCTION = same);
	CREATE OPERATOR mallory.<> (LEFTARG = text, RIGHTARG = text, FUNCTION = equal);
	CREATE OPERATOR mallory.= (LEFTARG = name, RIGHTARG = name, FUNCTION = same);
	CREATE OPERATOR public.= (LEFTARG = text, RIGHTARG = text, FUNCTION = equal);
	CREATE TABLE idem_store_state (LIKE public.idem_store_state);
	CREATE FUNCTION idem_generation(regclass) RETURNS smallint LANGUAGE sql
		AS $$ SELECT 0::smallint FROM (SELECT mallory.pure_attack('operator')) x $$;

	SELECT idem_create_store('mallory.hostile', '1 second', 2);
	ALTER TABLE hostile ADD COLUMN d boolean DEFAULT pure_attack('column_default');
	ALTER TABLE hostile ADD COLUMN g boolean
		GENERATED ALWAYS AS (pure_attack('generated_column' || left(key, 0))) STORED;
	ALTER TABLE hostile ADD CHECK (pure_attack('check_constraint' || left(key, 0)))});
foreach my $i (0, 1)
{
	hostile(
		qq{
		CREATE INDEX ON hostile_$i (pure_attack('index_expression' || left(key, 0)));
		CREATE INDEX ON hostile_$i (status)
			WHERE pure_attack('index_predicate' || left(key, 0));
		CREATE TRIGGER a BEFORE TRUNCATE ON hostile_$i FOR EACH STATEMENT
			EXECUTE FUNCTION attack_trigger('before_truncate');
		CREATE TRIGGER b AFTER TRUNCATE ON hostile_$i FOR EACH STATEMENT
			EXECUTE FUNCTION attack_trigger('after_truncate');
		CREATE TRIGGER c BEFORE INSERT OR UPDATE OR DELETE ON hostile_$i
			FOR EACH ROW EXECUTE FUNCTION attack_trigger('row_trigger');
		CREATE TRIGGER d AFTER INSERT OR UPDATE OR DELETE ON hostile_$i
			FOR EACH ROW EXECUTE FUNCTION attack_trigger('row_trigger');
		CREATE RULE r AS ON INSERT TO hostile_$i
			DO ALSO SELECT attack('rule');
		CREATE RULE s AS ON DELETE TO hostile_$i
			DO ALSO SELECT attack('rule')});
}

# A record to expire and a lease to carry over, in both generations
hostile(
	q{INSERT INTO hostile_0 (key, completed_at)
		VALUES ('old', now() - interval '1 hour');
	INSERT INTO hostile_0 (key, status, lease_until, token)
		VALUES ('lease', 'leased', now() + interval '1 hour', 1)});
hostile("ALTER SEQUENCE $_ RESTART") foreach @places, @never, @other;
hostile('INSERT INTO armed DEFAULT VALUES');
await(q{SELECT count(*) = 0 FROM mallory.hostile_0}, 'hostile store expires');
is(sql(q{SELECT key, status FROM mallory.hostile}),
	'lease|leased', 'hostile: the lease was moved');
await(q{SELECT generations_expired > 0
	FROM public.idem_store_status('mallory.hostile')}, 'noted');

cmp_ok(counted($_), '>', 0, "hostile: code of mallory's ran: $_")
  foreach @places;
is(counted($_), '0', "hostile: never called: $_") foreach @never;
is(counted('super'), '0', 'hostile: nothing ran as superuser');
is(counted('escaped'), '0', 'hostile: no way to become superuser');
is(sql(q{SELECT rolcreaterole FROM pg_roles WHERE rolname = 'mallory'}),
	'f', 'hostile: mallory may not create roles');
is(warnings_of('alice.innocent'), '0', 'hostile: others are not disturbed');
is(sql(q{SELECT public.idem_store_status('alice.innocent')::text ~ 'cannot'}),
	'f', 'hostile: no trouble elsewhere');

# The same from a superuser's session, which must be as it was before
{
	my $session = session($node);
	my $settings = q{SELECT string_agg(name || '=' || setting, ',' ORDER BY name)
		FROM pg_settings WHERE name OPERATOR(pg_catalog.=) ANY (ARRAY['search_path', 'lock_timeout',
			'statement_timeout', 'default_transaction_read_only',
			'default_transaction_isolation', 'synchronous_commit',
			'row_security', 'role', 'session_authorization',
			'session_replication_role'])};
	my $before;

	sql(q{ALTER SYSTEM SET idem.worker = off; SELECT pg_reload_conf()});
	await(q{SELECT NOT EXISTS (SELECT FROM pg_stat_activity
		WHERE backend_type OPERATOR(pg_catalog.=) 'idem worker')}, 'no worker');
	hostile(q{TRUNCATE armed; INSERT INTO hostile (key, completed_at, generation)
		VALUES ('old', now() - interval '1 hour', 0)});
	hostile("ALTER SEQUENCE $_ RESTART") foreach @places, 'super', 'escaped';
	hostile('INSERT INTO armed DEFAULT VALUES');
	$before = $session->query($settings);
	foreach my $i (1 .. 600)
	{
		$session->query('CALL public.idem_expire()');
		last if counted('after_truncate') > 0;
		select(undef, undef, undef, 0.1);
	}
	cmp_ok(counted('after_truncate'), '>', 0, 'CALL idem_expire() by a superuser');
	is(counted('super'), '0', 'CALL: nothing ran as superuser');
	is(counted('escaped'), '0', 'CALL: no way to become superuser');
	is($session->query($settings), $before, 'CALL: settings are as before');
	$session->quit;
	sql(q{ALTER SYSTEM RESET idem.worker; SELECT pg_reload_conf()});
}
sql(q{ALTER DATABASE postgres RESET search_path;
	ALTER DATABASE postgres RESET default_transaction_isolation});
$careful = '';

hostile('TRUNCATE armed');

# What it can do to itself: a policy, a deferred trigger, a trigger that
# refuses or that cannot be cancelled
hostile('DROP TABLE hostile');
hostile(
	q{SELECT idem_create_store('mallory.guarded', '1 second', 2);
	ALTER TABLE guarded_0 ENABLE ROW LEVEL SECURITY;
	ALTER TABLE guarded_0 FORCE ROW LEVEL SECURITY;
	CREATE POLICY p ON guarded_0 USING (attack('policy'));
	ALTER TABLE guarded_1 ENABLE ROW LEVEL SECURITY;
	ALTER TABLE guarded_1 FORCE ROW LEVEL SECURITY;
	CREATE POLICY p ON guarded_1 USING (attack('policy'));
	INSERT INTO guarded (key) VALUES ('a')});
is_stuck('mallory.guarded', qr/row-level security/, 'policy');
is(counted('policy'), '0', 'policy: never called');
hostile('DROP TABLE guarded');

hostile(
	q{SELECT idem_create_store('mallory.delayed', '1 second', 2);
	INSERT INTO delayed (key, status, lease_until, token)
		VALUES ('lease', 'leased', now() + interval '1 hour', 1);
	CREATE CONSTRAINT TRIGGER late AFTER INSERT OR DELETE ON delayed
		DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
		EXECUTE FUNCTION attack_trigger('deferred')});
is_stuck('mallory.delayed', qr/deferred trigger/, 'deferred trigger');
is(counted('deferred'), '0', 'deferred trigger: never called');
is(sql(q{SELECT key FROM mallory.delayed}), 'lease', 'the lease stays where it is');
hostile('DROP TABLE delayed');

hostile(
	q{SELECT idem_create_store('mallory.refusing', '1 second', 2);
	CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		RAISE EXCEPTION 'not today';
	END $$;
	CREATE TRIGGER a BEFORE TRUNCATE ON refusing_0 FOR EACH STATEMENT
		EXECUTE FUNCTION refuse();
	INSERT INTO refusing (key) VALUES ('a')});
is_stuck('mallory.refusing', qr/not today/, 'refusing trigger');
hostile('DROP TRIGGER a ON refusing_0');
is_well('mallory.refusing', 'trigger gone');
expires('mallory', 'mallory.refusing', 'trigger gone');
hostile('DROP TABLE refusing');

hostile(
	q{SELECT idem_create_store('mallory.endless', '1 second', 2);
	CREATE SEQUENCE rounds;
	CREATE FUNCTION stay() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM nextval('mallory.rounds');
		LOOP
			BEGIN
				PERFORM pg_sleep(60);
			EXCEPTION WHEN query_canceled THEN
				NULL;
			END;
		END LOOP;
	END $$;
	CREATE TRIGGER a BEFORE TRUNCATE ON endless_0 FOR EACH STATEMENT
		EXECUTE FUNCTION stay();
	INSERT INTO endless (key) VALUES ('a')});
await('SELECT last_value > 1 FROM mallory.rounds', 'endless trigger');
expires('alice', 'alice.innocent', 'endless trigger');
hostile('DROP TABLE endless');

# A table that only looks like a store breaks no view
hostile(
	q{CREATE TABLE evil (x bigint, CONSTRAINT idem_check CHECK (true))
		PARTITION BY LIST (x);
	CREATE TABLE evil_1 PARTITION OF evil FOR VALUES IN (99999999999);
	CREATE TABLE evil_2 PARTITION OF evil FOR VALUES IN (1, 2, NULL);
	CREATE TABLE evil_3 PARTITION OF evil DEFAULT;
	CREATE TABLE evil_range (x text, CONSTRAINT idem_check CHECK (true))
		PARTITION BY RANGE (x);
	CREATE TABLE evil_4 PARTITION OF evil_range
		FOR VALUES FROM ('99999999999') TO ('999999999999')});
is( sql(q{SELECT count(*) FROM idem_stores
		WHERE store = 'idem_completions'::regclass}),
	'1', 'a table that only looks like a store');

# Whoever is given the bookkeeping gains nothing by it
hostile("ALTER SEQUENCE $_ RESTART") foreach 'deferred', 'row_trigger', 'super';
sql(q{ALTER TABLE idem_store_state OWNER TO mallory});
{
	my $from = -s $node->logfile;

	hostile(
		q{INSERT INTO armed DEFAULT VALUES;
		CREATE CONSTRAINT TRIGGER late AFTER INSERT OR UPDATE OR DELETE
			ON public.idem_store_state DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION attack_trigger('deferred')});
	put('alice', 'alice.innocent');
	foreach my $i (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		last if slurp_file($node->logfile, $from) =~
		  /idem worker \w+:.*cannot fire deferred trigger/;
		select(undef, undef, undef, 0.1);
	}
	like(slurp_file($node->logfile, $from),
		qr/idem worker \w+:.*cannot fire deferred trigger/,
		'bookkeeping: a deferred trigger is refused');
	is(counted('deferred'), '0', 'bookkeeping: nothing ran at commit');

	hostile(
		q{DROP TRIGGER late ON public.idem_store_state;
		CREATE TRIGGER soon BEFORE UPDATE ON public.idem_store_state
			FOR EACH ROW EXECUTE FUNCTION attack_trigger('row_trigger')});
	put('alice', 'alice.innocent');
	await('SELECT is_called FROM mallory.row_trigger',
		'bookkeeping is changed');
	is(counted('super'), '0', 'bookkeeping: nothing ran as superuser');
	hostile('DROP TRIGGER soon ON public.idem_store_state');
	expires('alice', 'alice.innocent', 'bookkeeping');
}

unlike(slurp_file($node->logfile), qr/PANIC|TRAP|terminated by signal/,
	'nothing has crashed');
$node->stop;
done_testing();
