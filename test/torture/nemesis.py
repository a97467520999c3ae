"""Who breaks things.  One fault after the other, drawn from the seed.

Every fault that was really injected is a line in the file "faults": time, kind,
detail.  What must not happen to a fault itself (DROP DATABASE refused because of
idem's worker, say) is a line of the kind "wrong".

A failover only happens once the standby has all that was visible so far.  Otherwise
a commit whose wait for the standby was cut short by an earlier fault could be lost,
which PostgreSQL says of such commits, and idem can not mend.
"""

import json
import os
import random
import select
import signal
import subprocess
import threading
import time

import psycopg

from servers import Trouble

APPLICATION = "torture"  # of the workers' connections

# Weight of each kind; drawn one after the other.
FAULTS = {
    "kill_client": 28,
    "freeze_client": 16,
    "terminate_backend": 20,
    "cancel_backend": 12,
    "freeze_backend": 10,
    "freeze_server": 8,
    "cut_before_commit": 20,
    "cut_commit_reply": 20,
    "fill_workers": 4,
    "expire": 20,
    "vacuum": 5,
    "vacuum_full": 5,
    "reindex": 5,
    "reindex_concurrently": 5,
    "update_extension": 5,
    "databases": 3,
}
# All of the server at once: now and then one, each as often as the others.
BLOWS = ["kill_backend", "restart_fast", "restart_immediate", "failover"]
GIVES_WAY = ("55P03", "57014", "40P01", "57P01", "57P02", "57P03", "40001", "53300")


class Nemesis:
    def __init__(self, servers, seed, schema, log, proxy, pipe):
        self.servers, self.schema, self.pipe = servers, schema, pipe
        self.order = random.Random(f"{seed}/order")  # of faults; the same each time
        self.rng = random.Random(seed)  # whom they hit, which is also up to chance
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.proxy = proxy  # a connection to its control port
        self.cuts = json.loads(self.command("stats"))
        self.frozen = set()  # pids; each is thawed by a thread
        self.busy = []  # of (until, connection, ...) that hold worker slots
        self.conn = None

    def note(self, kind, detail=""):
        line = f"{time.monotonic_ns()}\t{kind}\t{detail}"
        os.write(self.log, (" ".join(line.splitlines()) + "\n").encode())

    def rage(self):
        """Until the conductor says anything; then all is well again."""
        order, blows, before_blow = self.order, [], 10
        while not self.rest(order.uniform(0.05, 0.3)):
            kind = order.choices(list(FAULTS), FAULTS.values())[0]
            before_blow -= 1
            if before_blow == 0:
                blows = blows or order.sample(BLOWS, len(BLOWS))
                kind, before_blow = blows.pop(), order.randint(10, 40)
            try:
                detail = getattr(self, kind)()
                if detail is not None:
                    self.note(kind, detail)
            except psycopg.OperationalError as error:
                self.conn = None  # it is down by an earlier fault, or gave way
                if error.sqlstate and error.sqlstate not in GIVES_WAY:
                    self.note("wrong", f"{kind}: {error.sqlstate} {error}")
            except psycopg.Error as error:
                if error.sqlstate not in GIVES_WAY:
                    self.note("wrong", f"{kind}: {error.sqlstate} {error}")
            self.note_cuts()
        self.heal()

    def rest(self, seconds):
        """True if the conductor has said that it is over."""
        self.busy = [b for b in self.busy if b[0] > time.monotonic()]
        return bool(select.select([self.pipe], [], [], seconds)[0])

    def thaw(self):
        for pid in self.frozen.copy():
            self.thaw_one(pid)

    def thaw_one(self, pid):
        send_signal(pid, signal.SIGCONT)
        self.frozen.discard(pid)

    def heal(self):
        self.thaw()
        self.busy.clear()
        self.command("disarm")
        self.note_cuts()
        self.servers.wait("the primary is up", "SELECT NOT pg_is_in_recovery()")
        self.servers.wait_for_standby()

    def db(self):
        if self.conn is None or self.conn.closed:
            self.conn = self.servers.connect(connect_timeout=5)
            self.conn.execute(
                f"SET search_path = {self.schema}, public;"
                "SET lock_timeout = '300ms'; SET statement_timeout = '8s';"
                "SET synchronous_commit = local"  # the walsender may be frozen
            )
        return self.conn

    def rows(self, query, *args):
        return self.db().execute(query, args).fetchall()

    def command(self, line):
        self.proxy.write(line + "\n")
        self.proxy.flush()
        return self.proxy.readline().strip()

    # Clients and their connections

    def ask_conductor(self, name):
        """The conductor knows the workers; it signals one of them."""
        slot = self.rng.randrange(1000)
        os.write(self.pipe, f"{name} {slot}\n".encode())
        return slot

    def kill_client(self):
        return self.ask_conductor("KILL")

    def freeze_client(self):
        return self.ask_conductor(f"STOP {self.rng.choice((0.1, 0.5, 1, 2.5))}")

    def backend(self, condition="application_name = 'torture'"):
        rows = self.rows(
            f"""
            SELECT pid FROM pg_stat_activity
             WHERE {condition} AND pid <> pg_backend_pid() ORDER BY pid
            """
        )
        return self.rng.choice(rows)[0] if rows else None

    def terminate_backend(self):
        return self.on_backend("SELECT pg_terminate_backend(%s)")

    def cancel_backend(self):
        return self.on_backend("SELECT pg_cancel_backend(%s)")

    def on_backend(self, query):
        pid = self.backend()
        return pid and self.rows(query, pid) and pid

    def cut_before_commit(self):
        self.command("arm before")

    def cut_commit_reply(self):
        self.command("arm reply")

    def note_cuts(self):
        """Counted where they have happened, which is a little later."""
        stats = json.loads(self.command("stats"))
        for kind in ("cut_before", "cut_reply"):
            for _ in range(stats[kind] - self.cuts.get(kind, 0)):
                self.note(kind)
            self.cuts[kind] = stats[kind]

    # Processes of the server

    def freeze_backend(self):
        return self.freeze(self.backend())

    def freeze_server(self):
        """Checkpointer, walsender, autovacuum, idem's own, …"""
        return self.freeze(self.backend("backend_type <> 'client backend'"))

    def freeze(self, pid):
        if pid is None or not send_signal(pid, signal.SIGSTOP):
            return None
        seconds = self.rng.choice((0.1, 0.5, 1.5))
        self.frozen.add(pid)
        timer = threading.Timer(seconds, self.thaw_one, (pid,))
        timer.daemon = True
        timer.start()
        return f"{pid} {seconds}"

    def kill_backend(self):
        """All other backends go down with it, and recovery follows."""
        pid = self.backend()
        self.thaw()
        if pid is None or not send_signal(pid, signal.SIGKILL):
            return None
        self.conn = None
        time.sleep(0.05)
        self.servers.wait("recovery", "SELECT NOT pg_is_in_recovery()")
        return pid

    def restart_fast(self):
        return self.restart("fast")

    def restart_immediate(self):
        return self.restart("immediate")

    def restart(self, mode):
        self.thaw()
        self.busy.clear()
        self.servers.restart(mode)
        self.conn = None
        return ""

    def failover(self):
        self.thaw()
        self.busy.clear()
        self.conn = None
        self.servers.wait_for_standby()
        self.servers.promote(self.rng.choice(("fast", "immediate")))
        port = self.servers.port(self.servers.primary())
        self.command(f"target 127.0.0.1:{port}")
        self.note("failover", f"to {self.servers.primary()}")
        time.sleep(self.rng.random())
        self.servers.rebuild_standby()
        return None

    def fill_workers(self):
        """Parallel workers take every slot for a while."""
        conn = self.servers.connect(connect_timeout=5)
        conn.execute(
            "SET max_parallel_workers_per_gather = 8; SET parallel_setup_cost = 0;"
            "SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0"
        )
        conn.pgconn.send_query(b"SELECT count(*) FROM pg_class WHERE pg_sleep(0.01) IS NOT NULL")
        self.busy.append((time.monotonic() + self.rng.choice((0.5, 3)), conn))
        return ""

    # What owners and administrators do

    def expire(self):
        for _ in range(self.rng.choice((1, 5))):
            self.db().execute("CALL idem_expire()")
        return ""

    def partition(self):
        store = self.rng.choice(("long", "short", "idem_completions"))
        return self.rng.choice(
            self.rows("SELECT inhrelid::regclass::text FROM pg_inherits"
                      " WHERE inhparent = %s::regclass ORDER BY 1", store)
        )[0]

    def vacuum(self):
        return self.maintain("VACUUM (FREEZE)")

    def vacuum_full(self):
        return self.maintain("VACUUM (FULL)")

    def reindex(self):
        return self.maintain("REINDEX TABLE")

    def reindex_concurrently(self):
        return self.maintain("REINDEX TABLE CONCURRENTLY")

    def maintain(self, command):
        target = self.partition()
        try:
            self.db().execute(f"{command} {target}")
        finally:
            if "CONCURRENTLY" in command:
                self.drop_leftovers()
        return target

    def drop_leftovers(self):
        """REINDEX CONCURRENTLY that was broken off leaves invalid indexes."""
        for (index,) in self.rows(
            "SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid"
            " AND indexrelid::regclass::text ~ '_cc(new|old)'"
        ):
            self.db().execute(f"DROP INDEX IF EXISTS {index}")

    def update_extension(self):
        self.db().execute("ALTER EXTENSION idem UPDATE")
        return ""

    def databases(self):
        """idem's worker must be in nobody's way."""
        name = "torture_other"
        self.thaw()
        self.db().execute("SET statement_timeout = '30s'; SET lock_timeout = 0")
        self.db().execute(f"DROP DATABASE IF EXISTS {name}")
        self.db().execute(f"CREATE DATABASE {name}")
        info = {**self.servers.conninfo(), "dbname": name}
        with psycopg.connect(**info, autocommit=True) as other:
            other.execute("CREATE EXTENSION idem; SELECT idem_once('k')")
        time.sleep(self.rng.random() * 1.5)
        self.db().execute(f"DROP DATABASE {name}")
        self.conn = None
        return ""


def send_signal(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def run(*args):
    nemesis = Nemesis(*args)
    try:
        nemesis.rage()
        os.write(nemesis.pipe, b"healed 0\n")
    except (Trouble, subprocess.TimeoutExpired, psycopg.Error) as error:
        nemesis.note("wrong", f"the server does not come back: {error!r}")
        os.write(nemesis.pipe, b"stuck 0\n")
    time.sleep(3600)  # the conductor ends this process
