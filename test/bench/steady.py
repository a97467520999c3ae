"""Stores that live: how they grow, and what expiry costs.

Time is compressed by short retentions, never by moved clocks: each record has
the age that it says, or was loaded with the age that a store which has run for
long would have it, and expiry does its real steps while claims run.
"""

import re
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass

from engine import (Contender, Figure, Result, Slice, compare, connect, pgbench, ratio, run_slice,
                    say, setup, setup_all, side, where)

GENERATIONS = 4


class Growth:
    """A claim in a store of many keys against one in an empty store.

    The claim and its record alone, so that no other work hides the difference.
    A bigger warm-up than elsewhere: while the tables were loaded there may have
    been a checkpoint, see engine.py.
    """

    name, work = "growth", "cost of a claim as the store grows"

    def run(self, server, options):
        sizes = [1_000_000, 10_000_000] if options.size == "large" else [1_000_000]
        for keys in sizes:
            yield from self.measure(server, options, keys, sizes[-1])

    def measure(self, server, options, keys, most):
        setup_all(server, "idem", "a", rows=0)
        server.run(
            "SELECT idem_create_store('grown')",
            # Spread over the generations, as in a store that has run for long.
            f"""INSERT INTO grown (key, result, generation)
                SELECT 'order:' || (1e18 * random())::bigint, '17', i % {GENERATIONS}
                  FROM generate_series(1, {keys}) i""",
            "CREATE TABLE IF NOT EXISTS key_a_grown (LIKE key_a_same INCLUDING ALL)",
            "TRUNCATE key_a_grown",
            f"""INSERT INTO key_a_grown (key)
                SELECT 'order:' || (1e18 * random())::bigint FROM generate_series(1, {keys}) i
                ON CONFLICT DO NOTHING""",
            "VACUUM (ANALYZE) grown", "VACUUM (ANALYZE) key_a_grown")
        slices = compare(server, [
            Contender("grown", "idem/grown", warm_up=keys // 50),
            Contender("empty", "idem/fresh", before="TRUNCATE idem_completions"),
            Contender("(a) grown", "a/grown", warm_up=keys // 50),
            Contender("(a) empty", "a/fresh", before="TRUNCATE key_a_same")], 8, "off", options)
        server.run("DROP TABLE grown, key_a_grown")
        tps = [[s.tps for s in contender] for contender in slices]
        millions = f"{keys // 1_000_000} M live keys"
        yield Result(self.name, f"cost of a claim at {millions}", "at an empty store", where(8, "off"),
                     ratio(tps[1], tps[0]), 1.25, at_most=True, section=True,
                     judges=keys == most,
                     sides={"grown": side(slices[0]), "empty": side(slices[1])})
        yield Result(self.name, f"the same of (a), at {millions}", "at an empty table", where(8, "off"),
                     ratio(tps[3], tps[2]),
                     sides={"grown": side(slices[2]), "empty": side(slices[3])})


class Job(threading.Thread):
    """What expires a contender's keys: a statement, again at once while it finds rows."""

    def __init__(self, sql, every):
        super().__init__()
        self.sql, self.every, self.stop, self.failure = sql, every, threading.Event(), None
        self.start()

    def run(self):
        try:
            with connect() as conn:
                conn.execute("SET synchronous_commit = off")
                conn.execute("SET lock_timeout = '10s'")
                while not self.stop.is_set():
                    if conn.execute(self.sql).rowcount <= 0:
                        self.stop.wait(self.every)
        except Exception as failure:  # told to the one who joins
            self.failure = failure

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.join()
        if self.failure:
            raise self.failure


@dataclass
class Living:
    """A contender with expiry: how it is loaded, and what its tables are."""

    label: str
    name: str
    tables: str  # LIKE pattern of the tables' names
    days: int = 30  # partitions of (f) that a retention has

    def load(self, server, keys, retention, start, window):
        """So many live keys at start, an equal number of each age below the retention."""
        self.variables = {"retention": retention, "day": retention / self.days, "days": self.days,
                          "rows": keys}
        if self.name != "idem":
            setup(self.name, start=start, **self.variables)
            return
        setup("idem", rows=0)
        # The current generation becomes full in the middle of the window, and
        # the oldest one has as much in it that is too old as it then has.
        period = retention / (GENERATIONS - 1)
        filled = max(0.1 * period, period - window / 2)
        current = GENERATIONS - 1
        oldest = filled + (GENERATIONS - 1) * period
        server.run(
            f"SELECT idem_set_retention(make_interval(secs => {retention}))",
            f"""INSERT INTO idem_completions (key, result, completed_at, generation)
                SELECT 'order:' || (1e18 * random())::bigint, '{{"invoice_no": 17}}',
                       to_timestamp({start} - age),
                       greatest(0, {current} - ceil(greatest(age - {filled}, 0) / {period})::int)
                  FROM generate_series(1, ceil({keys} * {oldest} / {retention}::float8)::int) i,
                       LATERAL (SELECT {retention}::float8 * i / {keys} - 1e-6) a (age)""",
            "VACUUM (ANALYZE) idem_completions",
            f"""UPDATE idem_store_state SET current = {current},
                       filling_since = to_timestamp({start} - {filled})""")
        # Seals the three that are full, with true notes but for the time.
        server.run("CALL idem_expire()")
        sealed = ", ".join(f"to_timestamp({start - filled - (current - 1 - g) * period})"
                           for g in range(current))
        count = server.ask("SELECT cardinality(sealed_at) FROM idem_store_state")
        if count != current:
            raise RuntimeError(f"{count} generations were sealed, not {current}")
        server.run(f"UPDATE idem_store_state SET sealed_at = ARRAY[{sealed}]")

    def job(self, every):
        if self.name == "idem":  # its worker does that
            return nullcontext()
        sql = Contender(self.label, f"{self.name}/expire").path.read_text()
        return Job(re.sub(r":(\w+)", lambda name: str(self.variables[name[1]]), sql), every)

    def size(self, server):
        """Rows there are, megabytes of tables and of indexes."""
        return server.ask(
            "SELECT sum((xpath('/row/n/text()', query_to_xml('SELECT count(*) AS n FROM ' || c.oid::regclass,"
            " false, true, '')))[1]::text::bigint)::bigint,"
            " round(sum(pg_table_size(c.oid)) / 1e6, 1)::float8,"
            " round(sum(pg_indexes_size(c.oid)) / 1e6, 1)::float8"
            " FROM pg_class c WHERE relname LIKE %s AND relkind = 'r'", self.tables)


def living(days=30):
    return (Living("idem", "idem", r"idem\_completions\__"), Living("(e)", "e", "key_e"),
            Living("(f)", "f", r"key\_f\_%", days))


class Settings:
    """Settings of the server for a while."""

    def __init__(self, server, **settings):
        self.server, self.settings = server, settings

    def __enter__(self):
        for name, value in self.settings.items():
            self.server.run(f"ALTER SYSTEM SET {name} = '{value}'")
        self.server.run("SELECT pg_reload_conf()")

    def __exit__(self, *_):
        self.server.run("ALTER SYSTEM RESET ALL", "SELECT pg_reload_conf()")


class Hour:
    """One hour, run 120 times as fast, at the same rate for all: what is left in the end.

    Keys are kept for 20 minutes.  What comes each minute in a real hour,
    autovacuum's and idem's workers and the jobs of the others, comes as much faster.
    """

    name, work = "hour", "after an hour of simulated time"
    speed, rate = 120, 2000

    def run(self, server, options):
        seconds = 3600 / self.speed
        retention = seconds / 3
        naptime = 60 / self.speed
        kept = int(self.rate * retention)
        with Settings(server, autovacuum_naptime=max(1, round(naptime)), **{"idem.naptime": 1}):
            setup_all(server)
            for contender in living(days=10):
                start = time.time() + 3
                contender.load(server, kept, retention, start, seconds)
                time.sleep(max(0, start - time.time()))
                with contender.job(naptime):
                    pgbench(Contender(contender.label, f"{contender.name}/key", contender.variables),
                            8, "off", "-T", round(seconds), "-R", self.rate)
                rows, table, indexes = contender.size(server)
                yield Figure(self.name, f"{contender.label} {self.work}, "
                             f"{kept:,} live keys",
                             {"rows": f"{rows:,}", "table, MB": f"{table}", "indexes, MB": f"{indexes}"})


class Steady:
    """Many live keys, and as many that expire as come: one window after the other, at full speed."""

    name, work = "steady", "steady state with expiry on"

    def run(self, server, options):
        keys, seconds, pairs = (10_000_000, 180, 2) if options.size == "large" else (200_000, 30, 1)
        keys, seconds = options.keys or keys, options.window or seconds
        setup_all(server, "e", rows=100_000, start=time.time(), retention=86400)
        speed = run_slice(server, Contender("(e)", "e/key", {"retention": 86400}), 8, "off", "-T", 5).tps
        retention = round(1.25 * keys / speed)
        taken = {c.label: [] for c in living()}
        left = {}
        with Settings(server, autovacuum_naptime=10, **{"idem.naptime": 10}):
            for turn in range(pairs):
                contenders = living() if turn == 0 else living()[:2]
                for contender in reversed(contenders) if turn % 2 else contenders:
                    one, left[contender.label] = self.window(
                        server, contender, keys, retention, seconds)
                    say(f"{self.name:9} {contender.label}: {one.tps:.0f}/s, {one.wal:.0f} B WAL; "
                        f"{left[contender.label]}")
                    taken[contender.label].append(one)
        what = (f"claim and complete alone, {keys:,} live keys, kept {retention} s; {keys / retention:.0f} expire a second; "
                f"windows of {seconds} s")
        for label in ("(e)", "(f)"):
            ours, theirs = taken["idem"], taken[label]
            sides = {"idem": side(ours), label: side(theirs)}
            judged = label == "(e)"
            cpu = ratio([s.cpu for s in theirs], [s.cpu for s in ours])
            yield Result(self.name, self.work, label, f"throughput; {what}",
                         ratio([s.tps for s in ours], [s.tps for s in theirs]),
                         1.5 if judged else None, section=judged, cpu=cpu, sides=sides)
            yield Result(self.name, self.work, label, f"WAL; {what}",
                         ratio([s.wal for s in ours], [s.wal for s in theirs]),
                         0.25 if judged else None, at_most=True, section=judged, sides=sides)
        for label, values in left.items():
            yield Figure(self.name, f"{label} after its last window",
                         {name: f"{value:,}" for name, value in values.items()})

    def window(self, server, contender, keys, retention, seconds):
        server.run("DROP TABLE IF EXISTS key_e, key_f", "TRUNCATE idem_completions")
        setup_all(server)
        start = time.time() + 5 + keys / 40_000
        contender.load(server, keys, retention, start, seconds)
        server.run("CHECKPOINT")
        if time.time() > start:
            say(f"{contender.label}: loading took {time.time() - start:.0f} s longer than planned; "
                "what became too old meanwhile has to be expired besides")
        time.sleep(max(0, start - time.time()))
        server.wait_alone()
        cpu, wal = server.cpu(), server.wal()
        with contender.job(every=1):
            tps, count = pgbench(Contender(contender.label, f"{contender.name}/key",
                                           contender.variables), 8, "off", "-T", seconds)
        server.wait_alone()
        taken = Slice(tps, 1e6 * (server.cpu() - cpu) / count, (server.wal() - wal) / count, [])
        left = dict(zip(("rows", "table, MB", "indexes, MB"), contender.size(server)))
        if contender.name == "idem":
            left["generations emptied"] = server.ask("SELECT generations_expired FROM idem_store_state")
        if contender.name == "e":
            left["expired and still there"] = server.ask(
                "SELECT count(*) FROM key_e WHERE expires_at < now()")
        return taken, left


TABLE = [Growth(), Hour(), Steady()]
