"""The comparisons that are made with pgbench alone."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from engine import Contender, Figure, Result, compare, ratio, setup_all, side, where

ROWS = 100_000  # keys that are there before

# (clients, synchronous_commit).  The first one judges: 8 clients keep a small
# machine busy, and with synchronous_commit = off it is the server's work that is
# measured.  With it on, most of the time is the disk's, the same for both.
JUDGE = (8, "off")
WIDE = (JUDGE, (1, "off"), (2, "off"), (32, "off"), (1, "on"), (32, "on"))
SOME = (JUDGE, (1, "off"))


@dataclass
class Row:
    name: str  # for --only
    work: str
    against: str
    ours: Contender
    theirs: Contender
    setups: tuple  # contenders that have to be set up
    target: float = None
    grid: tuple = (JUDGE,)
    section: bool = False

    def run(self, server, options):
        for clients, sync in options.grid or self.grid:
            setup_all(server, *self.setups, rows=ROWS)
            ours, theirs = compare(server, [self.ours, self.theirs], clients, sync, options)
            yield Result(
                self.name, self.work, self.against, where(clients, sync),
                ratio([s.tps for s in ours], [s.tps for s in theirs]), self.target,
                judges=(clients, sync) == self.grid[0], section=self.section,
                cpu=ratio([s.cpu for s in theirs], [s.cpu for s in ours]),
                sides={self.ours.label: side(ours), self.theirs.label: side(theirs)})


class Single:
    """A batch of 1,000 against 1,000 statements that claim one key each.

    All else is alike: one transaction, completed in one statement.
    """

    name, work, against = "batch", "batch of 1,000 keys", "1,000 single claims"

    def run(self, server, options):
        with TemporaryDirectory() as tmp:
            batch = Contender("batch", "idem/batch", warm_up=8)
            lines = batch.path.read_text().splitlines()
            at = next(i for i, line in enumerate(lines) if line.startswith("SELECT"))
            single = Path(tmp, "single.sql")
            single.write_text("\n".join(lines[:at] + [
                f"SELECT claimed FROM idem_claim('row:' || :n || ':' || {i});" for i in range(1, 1001)
            ] + lines[at + 2:]))
            yield from Row(self.name, self.work, self.against, batch,
                           Contender("single", single.with_suffix(""), warm_up=8),
                           ("idem",), 3.0, ((2, "off"),)).run(server, options)


class Field:
    """All contenders, and the work without any key, in the same rounds."""

    name, work, against = "field", "claim and complete around one insert", "all contenders"
    expiry = {"retention": 30 * 86400, "day": 86400, "days": 30}

    def run(self, server, options):
        start = server.ask("SELECT extract(epoch FROM now())")
        setup_all(server, "idem", *"abcdef", rows=ROWS, start=start, **self.expiry)
        contenders = [Contender(label, f"{name}/claim", self.expiry) for label, name in (
            ("idem", "idem"), ("no key", "bare"), ("(a)", "a"), ("(b)", "b"), ("(c)", "c"),
            ("(d)", "d"), ("(e)", "e"), ("(f)", "f"))]
        slices = compare(server, contenders, *JUDGE, options, latencies=True)
        for contender, theirs in zip(contenders[1:], slices[1:]):
            yield Result(self.name, self.work, contender.label, where(*JUDGE),
                         ratio([s.tps for s in slices[0]], [s.tps for s in theirs]),
                         cpu=ratio([s.cpu for s in theirs], [s.cpu for s in slices[0]]),
                         sides={"idem": side(slices[0]), contender.label: side(theirs)})
        floor = side(slices[1])["B WAL"]
        labels = [c.label for c in contenders]
        yield Figure(self.name, "WAL of a claim and its completion, bytes", {
            label: f"{side(s)['B WAL'] - floor:.0f}" for label, s in zip(labels, slices)
            if label != "no key"})
        for percent in (50, 95, 99):
            yield Figure(self.name, f"latency of the transaction, {percent}th percentile, ms, 8 clients",
                         {label: f"{percentile(s, percent):.2f}" for label, s in zip(labels, slices)})


def percentile(slices, percent):
    took = sorted(t for s in slices for t in s.latencies)
    return took[min(len(took) - 1, len(took) * percent // 100)]


def idem(script, label="idem", **variables):
    return Contender(label, f"idem/{script}", {"rows": ROWS, **variables})


def hand(letter, script, **variables):
    return Contender(f"({letter})", f"{letter}/{script}", {"rows": ROWS, **variables})


KB = '{"lines": "' + "0123456789" * 100 + '"}'

TABLE = [
    Row("claim", "claim and complete around one insert",
        "(b) INSERT … ON CONFLICT DO NOTHING, then UPDATE … SET result",
        idem("claim"), hand("b", "claim"), ("idem", "b"), 1.15, WIDE, section=True),
    Row("request", "the same with a request", "(c) PL/pgSQL claim function, then UPDATE",
        idem("request"), hand("c", "request"), ("idem", "c"), 1.5, SOME, section=True),
    Row("once", "`idem_once` around one insert", "(a) INSERT key … ON CONFLICT DO NOTHING, same columns",
        idem("once"), hand("a", "once"), ("idem", "a"), 1.0, SOME, section=True),
    Row("run", "`idem_run` of a handler with one insert", "the same as four statements",
        idem("run", "idem_run"), idem("four", "statements"), ("idem",), 2.0, SOME, section=True),
    Row("replay", "replay of a completed key", "prepared SELECT … WHERE key = by primary key",
        idem("replay"), Contender("SELECT", "b/replay", {"rows": ROWS}), ("idem", "b"),
        0.95, SOME, section=True),
    Row("hot", "replay, all clients on one key", "prepared SELECT … WHERE key = by primary key",
        idem("hot"), Contender("SELECT", "b/hot"), ("idem", "b"), None, ((32, "off"),)),
    Row("long", "claim and complete, keys of 512 bytes", "(b)",
        idem("long"), hand("b", "long"), ("idem", "b")),
    Row("large", "claim and complete, results of 1 kB", "(b)",
        idem("large", result=KB), hand("b", "large", result=KB), ("idem", "b")),
    Single(),
    Row("bulk", "batch of 1,000 keys, and completed", "(b) in two statements",
        Contender("batch", "idem/batch", warm_up=8), Contender("(b)", "b/batch", warm_up=8),
        ("idem", "b"), None, ((2, "off"),)),
    Field(),
]
