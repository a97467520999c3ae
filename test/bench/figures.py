"""What is measured without pgbench: waiters, locks, memory, counting, instructions."""

import os
import re
import select
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from psycopg import pq

from engine import DATABASE, HERE, Figure, Result, Spread, connect, setup_all


class Waiters:
    """100 duplicates wait for one key; how long after its COMMIT has the last one its answer?

    From just before COMMIT is sent until the answer is read by this program, which
    reads all of them and sleeps in between.
    """

    name, work = "waiters", "100 duplicates waiting on one key: until all are answered"
    count = 100
    by_hand = {  # label → (claim, complete, what a duplicate sends)
        "idem": ("SELECT claimed FROM idem_claim('{0}')",
                 "SELECT idem_complete('{0}', '{{\"invoice_no\": 17}}')",
                 "SELECT result::text FROM idem_claim('{0}')"),
        "(b)": ("INSERT INTO key_b (key) VALUES ('{0}') ON CONFLICT DO NOTHING",
                "UPDATE key_b SET result = '{{\"invoice_no\": 17}}' WHERE key = '{0}'",
                "INSERT INTO key_b (key) VALUES ('{0}') ON CONFLICT DO NOTHING;"
                " SELECT result::text FROM key_b WHERE key = '{0}'"),
    }

    def run(self, server, options):
        setup_all(server, "idem", "b", rows=0)
        took = {label: [] for label in self.by_hand}
        connections = [pq.PGconn.connect(f"dbname={DATABASE}".encode()) for _ in range(self.count)]
        try:
            for turn in range(options.pairs):
                for label, sql in self.by_hand.items():
                    took[label].append(self.once(server, connections, f"wait:{label}:{turn}", sql))
        finally:
            for connection in connections:
                connection.finish()
        yield Result(self.name, self.work, "COMMIT", f"{self.count} waiters",
                     Spread.of(took["idem"]), 50, at_most=True, unit=" ms", section=True)
        yield Figure(self.name, self.work + ", ms",
                     {label: str(Spread.of(values)) for label, values in took.items()})

    def once(self, server, connections, key, sql):
        claim, complete, duplicate = (s.format(key) for s in sql)
        with connect() as holder:
            holder.execute("BEGIN")
            holder.execute(claim)
            for connection in connections:
                connection.send_query(duplicate.encode())
            while server.ask("SELECT count(*) FROM pg_stat_activity"
                             " WHERE wait_event_type = 'Lock'") < self.count:
                time.sleep(0.01)
            holder.execute(complete)
            begun = time.perf_counter()
            holder.execute("COMMIT")
            waiting = {connection.socket: connection for connection in connections}
            while waiting:
                for fd in select.select(list(waiting), [], [])[0]:
                    waiting[fd].consume_input()
                    if not waiting[fd].is_busy():
                        del waiting[fd]
            took = time.perf_counter() - begun
        for connection in connections:
            while answer := connection.get_result():
                last = answer
            if last.status != pq.ExecStatus.TUPLES_OK or last.get_value(0, 0) != b'{"invoice_no": 17}':
                sys.exit(f"waiters: wrong answer for {key}: {last.error_message}")
            while connection.get_result():
                pass
        return 1000 * took


class Locks:
    """What the lock table holds for a transaction that has claimed a key."""

    name, work = "locks", "locks held by a claiming transaction"

    def run(self, server, options):
        setup_all(server, "idem", "b", "c", rows=100)
        for label, claim, complete in (
                ("idem", "SELECT idem_claim('one')", "SELECT idem_complete('one', '1')"),
                ("(b)", "INSERT INTO key_b (key) VALUES ('one') ON CONFLICT DO NOTHING",
                 "UPDATE key_b SET result = '1' WHERE key = 'one'"),
                ("(c)", "SELECT claim_c('one', '{}')", "UPDATE key_c SET result = '1' WHERE key = 'one'")):
            with connect() as conn:
                conn.execute("BEGIN")
                conn.execute(claim)
                claimed = self.held(server, conn)
                conn.execute(complete)
                completed = self.held(server, conn)
                conn.execute("ROLLBACK")
            yield Figure(self.name, f"{self.work}: {label}",
                         {"claimed": claimed, "completed": completed})

    def held(self, server, conn):
        total, shared, transaction = server.ask(
            "SELECT count(*), count(*) FILTER (WHERE NOT fastpath AND locktype NOT LIKE '%%xid'"
            " AND locktype <> 'transactionid'),"
            " count(*) FILTER (WHERE locktype LIKE '%%xid' OR locktype = 'transactionid')"
            " FROM pg_locks WHERE pid = %s", conn.info.backend_pid)
        return f"{total} ({shared} in the shared table, {transaction} its own ids)"


class Memory:
    """What a backend has allocated more after many claims than after few."""

    name, work = "memory", "memory of a backend"
    apart = """DO $$ BEGIN FOR i IN 1..{n} LOOP
        PERFORM idem_claim('{tag}' || i); PERFORM idem_complete('{tag}' || i, '1'); COMMIT;
        END LOOP; END $$"""
    together = """SELECT count(idem_complete('{tag}' || i, '1'))
        FROM generate_series(1, {n}) i, idem_claim('{tag}' || i) WHERE claimed"""

    def run(self, server, options):
        n = 1_000_000 if options.size == "large" else 100_000
        setup_all(server, "idem", rows=0)
        with connect() as conn:
            conn.execute("SET synchronous_commit = off")
            for what, sql in (("in transactions of their own", self.apart),
                              ("in one transaction, while it is open", self.together)):
                conn.execute(sql.format(n=1000, tag=f"warm {what}"))
                before = self.used(conn)
                if sql is self.together:
                    conn.execute("BEGIN")
                conn.execute(sql.format(n=n, tag=f"many {what}"))
                after = self.used(conn)
                if sql is self.together:
                    conn.execute("COMMIT")
                yield Figure(self.name, f"{self.work} after {n:,} claims {what}, more than after 1,000",
                             {"contexts, kB": f"{after[0] - before[0]:+.0f}",
                              "private memory, kB": f"{after[1] - before[1]:+.0f}"})

    def used(self, conn):
        contexts = conn.execute("SELECT sum(total_bytes) FROM pg_backend_memory_contexts").fetchone()[0]
        with open(f"/proc/{conn.info.backend_pid}/status") as f:
            return float(contexts) / 1024, int(re.search(r"RssAnon:\s+(\d+)", f.read())[1])


class Track:
    """idem.track on against off, by test/bench/track-overhead, which pairs small batches."""

    name, work = "track", "counting (`idem.track`)"

    def run(self, server, options):
        setup_all(server, "idem", rows=0)
        done = subprocess.run([HERE / "track-overhead", "100"], check=True, text=True,
                              stdout=subprocess.PIPE, env=dict(os.environ, PGDATABASE=DATABASE))
        for line in done.stdout.splitlines():
            found = re.match(r"(.*): ([-+.\d]+)% \(95%: ([-+.\d]+) to ([-+.\d]+)\)", line)
            slower, low, high = (float(x) / 100 for x in found.groups()[1:])
            yield Result(self.name, f"{found[1]}, counted", "not counted", "1 client, processor time",
                         Spread(1 / (1 + slower), 1 / (1 + high), 1 / (1 + low)), 0.99)


class Instructions:
    """Instructions a call, which no noise can touch; test/bench/instructions counts them."""

    name, work = "instructions", "instructions of the server a call"
    # What of them is spent below these functions, for the claim of a new key
    parts = {"searches of an index": "_bt_first", "insertions into a B-tree": "_bt_doinsert",
             "locks": "LockAcquireExtended", "heap insertion": "heap_insert",
             "heap update": "heap_update"}

    def run(self, server, options):
        with TemporaryDirectory() as tmp:
            done = subprocess.run([HERE / "instructions", "--profile", tmp], check=True, text=True,
                                  stdout=subprocess.PIPE)
            counted = dict(line.rsplit(None, 1) for line in done.stdout.splitlines())
            for what in dict.fromkeys(name.partition(": ")[2] for name in counted):
                yield Figure(self.name, f"{self.work}: {what}",
                             {name.partition(": ")[0]: f"{int(n):,}" for name, n in counted.items()
                              if name.partition(": ")[2] == what})
            for name in ("idem: claim and complete", "(b): claim and complete"):
                more, less = (below(Path(tmp, f"{name}.{n}")) for n in (600, 100))
                spent = {what: [(x - y) / 500 for x, y in zip(more[f], less[f])]
                         for what, f in self.parts.items()}
                yield Figure(self.name, f"of them, {name}", {
                    what: f"{instructions:,.0f} in {calls:.0f}"
                    for what, (calls, instructions) in spent.items()})


def below(profile):
    """For each function in callgrind's output: how often it was called, and what that cost."""
    names, spent = {}, defaultdict(lambda: [0, 0])
    with open(profile) as f:
        for line in f:
            if found := re.match(r"(c?fn)=\((\d+)\)(?: (.*))?$", line):
                name = names.setdefault(found[2], found[3])
                if found[1] == "cfn":
                    called = name
            elif found := re.match(r"calls=(\d+)", line):
                spent[called][0] += int(found[1])
                spent[called][1] += int(next(f).split()[1])
    return spent


TABLE = [Waiters(), Track(), Locks(), Memory(), Instructions()]
