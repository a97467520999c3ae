# Claims at full speed while records live for seconds only, for 20 turns of the
# ring: nothing is done again before its retention has passed since its commit,
# nothing is lost, and the size stays bounded.
#
# Each client keeps a ledger of what it committed when, and asks again for keys
# of its own of all ages.  Afterwards the same is asked of the commit times
# that the server has noted.  In "fast" only the worker expires; "slow" has
# CALL idem_expire() besides, as often as it goes, so that both race; there
# most of the slow transactions are, which stay open across flips.  Leases have
# to outlive it all.

use strict;
use warnings;

use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time sleep);

use Idem;

# The client is a Python program, as in the demo
my $python = '/usr/bin/python3';
plan skip_all => 'needs Python with psycopg'
  if system("$python -c 'import psycopg' >/dev/null 2>&1") != 0;

my $turns = 20;
my $clients = 8;
my %generations = (fast => 3, slow => 4);
my %retention = (fast => 1, slow => 2);

my $node = idem_node('main', preload => 1, conf => q{
idem.naptime = 1
idem.wait_timeout = -1
track_commit_timestamp = on
log_statement = none
max_connections = 40
shared_buffers = 128MB
max_wal_size = 2GB
});

sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# The client: asks again for its keys of all ages, and makes new ones.  Prints
# a line for whatever is wrong, and a last one of what it has done.
my $dir = PostgreSQL::Test::Utils::tempdir();
append_to_file("$dir/client.py", <<'END');
import os, random, sys, time
import psycopg

me, slow, stop, retention = sys.argv[2], sys.argv[3] == "slow", sys.argv[4], eval(sys.argv[5])
random.seed(me)
conn = psycopg.connect(sys.argv[1], autocommit=True, prepare_threshold=1)
stores = sorted(retention)
ledger = {store: [] for store in stores}  # (key, begun, committed, result), oldest first
claims = done = replays = early = 0
worst = []


def job(store, key, result):
    return conn.execute("SELECT * FROM job(%s, %s, %s)", (store, key, result)).fetchone()


def commit_late(store, key, result):
    "Completes at once or in the end, and stays open for longer than the retention."
    pause = random.random() * 1.5 * retention[store]
    how = random.randrange(4)
    with conn.transaction():
        if how == 0:  # completed long before the commit
            answer = job(store, key, result)
            time.sleep(pause)
        elif how == 1:  # claimed long before it is completed
            row = conn.execute("SELECT claimed, result::text FROM idem_claim(%s, store => %s)", (key, store)).fetchone()
            time.sleep(pause)
            if row[0]:
                conn.execute("SELECT done(%s, %s, %s)", (store, key, result))
            answer = row
        elif how == 2:  # not alone in its transaction, and not at the top of it
            with conn.transaction():
                conn.execute("SELECT * FROM job(%s, %s, %s)", (store, key + " besides", result))
                time.sleep(pause)
            with conn.transaction():
                answer = job(store, key, result)
        else:  # taken back, and done again
            try:
                with conn.transaction():
                    job(store, key, result)
                    time.sleep(pause)
                    raise psycopg.Rollback()
            except psycopg.Rollback:
                pass
            answer = job(store, key, result)
        begun = time.time()
    return answer, begun


while not os.path.exists(stop):
    store = "slow" if slow and random.random() < 0.9 else random.choice(stores)
    known = ledger[store]
    while known and known[0][2] < time.time() - 4 * retention[store]:
        known.pop(0) if len(known) < 50 else known.__delitem__(slice(0, len(known) // 10))
    old = random.choice(known) if known and random.random() < 0.5 else None
    if random.random() < 0.02:
        n = random.randrange(4)
        status = conn.execute("SELECT status FROM idem_try_claim(%s, store => %s)", (f"lease {n}", store)).fetchone()[0]
        if status != "in_progress":
            print("wrong: lease", n, "is", status)
        continue
    claims += 1
    key = old[0] if old else f"{me}-{claims}"
    result = f'{{"by": "{me}", "n": {claims}}}'
    begun = time.time()
    if slow:
        (claimed, stored), begun = commit_late(store, key, result)
    else:
        claimed, stored = job(store, key, result)
    over = time.time()
    if not slow:
        worst.append((over - begun, begun))
        if len(worst) > 10000:
            worst = sorted(worst)[-100:]
    if claimed:
        done += 1
        if old:
            known.remove(old)
            # committed after old[1], claimed before "over"
            if over - old[1] < retention[store]:
                early += 1
                print("wrong:", key, "done again after", over - old[1])
        known.append((key, begun, over, result))
    elif not old:
        print("wrong:", key, "was not known, but:", stored)
    else:
        replays += 1
        if stored != old[3]:
            print("wrong:", key, "replayed:", stored, "stored:", old[3])
worst = sorted(worst)[-1:] or [(0, 0)]
print("ledger:", claims, done, replays, early, round(worst[0][0] * 1000), round(worst[0][1] * 1000))
END

sql(q{
	CREATE TABLE effect (store text, key text, claimed_at timestamptz);
	CREATE FUNCTION done(store text, key text, result text) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		INSERT INTO effect VALUES (store, key, clock_timestamp());
		PERFORM idem_complete(key, result, store => store::regclass);
	END $$;
	CREATE FUNCTION job(store text, key text, my text, OUT claimed boolean, OUT result text) LANGUAGE plpgsql AS $$
	DECLARE
		outcome idem_outcome;
	BEGIN
		outcome := idem_claim(key, store => store::regclass);
		claimed := outcome.claimed;
		result := outcome.result::text;
		IF claimed THEN
			PERFORM done(store, key, my);
		END IF;
	END $$});
foreach my $store (sort keys %retention)
{
	sql("SELECT idem_create_store('$store', '$retention{$store} s', $generations{$store});
		INSERT INTO $store (key, status, lease_until)
			SELECT 'lease ' || n, 'leased', 'infinity' FROM generate_series(0, 3) AS n");
}
my $stores = join ', ', map { "'$_'" } sort keys %retention;

# A row in a sealed generation that a transaction has written which began after
# the sealing: there must be none
my $intruders = join ' UNION ALL ', map {
	my $store = $_;
	map {
		"SELECT '${store}_$_', r.key FROM ${store}_$_ AS r, idem_store_state AS s "
		  . "WHERE s.store_name = '$store' AND s.sealed_file[$_ + 1] = pg_relation_filenode('${store}_$_') "
		  . "AND r.xmin::text::bigint >= s.sealed_xid[$_ + 1]::text::bigint"
	} 0 .. $generations{$store} - 1
} sort keys %retention;

my @running;
my $stop = "$dir/stop";
my $retentions = "{" . join(', ', map { "'$_': $retention{$_}" } sort keys %retention) . "}";
foreach my $n (1 .. $clients + 3)
{
	my ($out, $err) = ('', '');
	push @running,
	  {
		out => \$out,
		err => \$err,
		run => IPC::Run::start(
			[
				$python, "$dir/client.py", $node->connstr('postgres'),
				"client$n", $n > $clients ? 'slow' : 'fast', $stop, $retentions
			],
			'>', \$out, '2>', \$err)
	  };
}

my $watcher = session($node);
my $expired = {};
my $found = '';
my @sizes;
my $before = sql("SELECT sum(bytes) FROM idem_stores WHERE store::text IN ($stores)");
my $start = time;
my $give_up = $start + 4 * $PostgreSQL::Test::Utils::timeout_default / 3;
my $samples = 0;
while (1)
{
	$expired = { split /[|\n]/, $watcher->query(
		"SELECT store_name, generations_expired FROM idem_store_state WHERE store_name IN ($stores) ORDER BY 1") };
	last if $expired->{fast} >= $turns * $generations{fast};
	last if time > $give_up;
	push @sizes,
	  $watcher->query("SELECT sum(bytes) FROM idem_stores WHERE store::text IN ($stores)");
	$found .= $watcher->query($intruders) if ++$samples % 10 == 0;
	$watcher->query(q{CALL idem_expire('slow')});
	sleep(0.05);
}
my $took = time - $start;
append_to_file($stop, '');

my ($claims, $done, $replays, $early, $worst, @wrong) = (0, 0, 0, 0, 0);
foreach my $client (@running)
{
	$client->{run}->finish;
	push @wrong, ${ $client->{err} } if ${ $client->{err} };
	push @wrong, grep { /^wrong/ } split /\n/, ${ $client->{out} };
	push @wrong, "no last word: ${ $client->{out} }"
	  unless ${ $client->{out} } =~ /^ledger: (\d+) (\d+) (\d+) (\d+) (\d+) (\d+)$/m;
	$claims += $1, $done += $2, $replays += $3, $early += $4;
	$worst = $5 if $5 > $worst;
}

foreach my $store (sort keys %generations)
{
	my $least = $store eq 'fast' ? $turns : $turns / 4;
	cmp_ok($expired->{$store}, '>=', $least * $generations{$store},
		"$store: $least turns of the ring");
	is( sql("SELECT count(*) FROM (SELECT claimed_at - lag(pg_xact_commit_timestamp(xmin)) "
			  . "OVER (PARTITION BY key ORDER BY claimed_at) AS age FROM effect WHERE store = '$store') AS e "
			  . "WHERE age < interval '$retention{$store} s'"),
		'0', "$store: nothing was done again too early, by the server's commit times");
	cmp_ok(
		sql("SELECT count(*) FROM (SELECT FROM effect WHERE store = '$store' GROUP BY key HAVING count(*) > 1) AS e"),
		'>', 0, "$store: keys were done again later");
	is(sql("SELECT string_agg(key, ',' ORDER BY key) FROM $store WHERE status = 'leased'"),
		'lease 0,lease 1,lease 2,lease 3', "$store: the leases are there");
	is(sql("SELECT trouble FROM idem_stores WHERE store = '$store'::regclass"),
		'', "$store: no trouble");
}
is(join("\n", @wrong[ 0 .. ($#wrong < 20 ? $#wrong : 20) ]), '', 'all ledgers agree');
is($early, 0, 'nothing was done again too early, by the ledgers');
is($found, '', 'nothing came into a sealed generation');
cmp_ok($replays, '>', $done / 20, 'there were replays');

# Half of the turns, and then the other half: no growth
my $half = int(@sizes / 2);
my ($first) = sort { $b <=> $a } @sizes[ 0 .. $half ];
my ($second) = sort { $b <=> $a } @sizes[ $half + 1 .. $#sizes ];
cmp_ok($second, '<', 2 * $first, 'the size is bounded');
cmp_ok(sql(q{SELECT (SELECT count(*) FROM fast) + (SELECT count(*) FROM slow)}),
	'<', $done / 3, 'what is there is a small part of what was');

# No more claims: all goes but the leases
ok( $node->poll_query_until('postgres',
		q{SELECT (SELECT count(*) FROM fast) + (SELECT count(*) FROM slow) < 1000 + 8}),
	'the last generation but one goes as well');
diag(sprintf '%s; %d claims in %.0f s (%.0f/s), %d done, %d replayed, %d done again too early; '
	  . 'worst stall of a claim %d ms; size %.1f MB before, at most %.1f MB, then %.1f MB, in the end %.1f MB',
	join(', ', map { sprintf '%s: %.1f turns', $_, $expired->{$_} / $generations{$_} } sort keys %generations),
	$claims, $took, $claims / $took, $done, $replays, $early, $worst,
	$before / 1e6, $first / 1e6, $second / 1e6,
	sql("SELECT sum(bytes) FROM idem_stores WHERE store::text IN ($stores)") / 1e6);

$watcher->quit;
$node->stop;
done_testing();
