"""The comparisons that are made with pgbench: rows of the table."""

from dataclasses import dataclass, field

from engine import Contender, compare, connect, ratio, say, setup, Spread

ROWS = 100_000  # keys that are there before; see contenders/*/setup.sql


@dataclass
class Row:
    name: str  # for --only
    work: str
    against: str
    contenders: list  # the first is idem's, the second what it is compared with
    target: float = None  # times the throughput
    grid: tuple = ((8, "off"),)  # (clients, synchronous_commit); the first judges
    setups: tuple = ()

    def run(self, server, options):
        grid = options.grid or self.grid
        return [self.measure(server, options, clients, sync) for clients, sync in grid]

    def measure(self, server, options, clients, sync):
        for name in ("bare", *self.setups):
            setup(name, ROWS)
        slices = compare(server, self.contenders, clients, sync, options.pairs, options.seconds)
        result = {
            "row": self.name, "work": self.work, "against": self.against,
            "target": self.target, "clients": clients, "sync": sync,
            "ratio": ratio(slices[0], slices[1]),
            "cpu": ratio(slices[1], slices[0], "cpu"),
            "sides": {c.label: {"tps": Spread.of(s.tps for s in side),
                                "cpu": Spread.of(s.cpu for s in side),
                                "wal": Spread.of(s.wal for s in side)}
                      for c, side in zip(self.contenders, slices)},
        }
        say(f"{self.name:10} {clients:3} clients, sync {sync:3}: {result['ratio']} ×"
            f"  server CPU {result['cpu']} ×  "
            + ", ".join(f"{label} {side['tps'].median:.0f}/s {side['cpu'].median:.0f} µs"
                        for label, side in result["sides"].items()))
        return result


def side(label, script, **variables):
    return Contender(label, script, variables={"rows": ROWS, **variables})


WIDE = ((8, "off"), (1, "off"), (2, "off"), (32, "off"), (1, "on"), (2, "on"), (8, "on"), (32, "on"))
SOME = ((8, "off"), (1, "off"), (8, "on"))

TABLE = [
    Row("claim", "claim and complete around one insert",
        "(b) INSERT … ON CONFLICT DO NOTHING, then UPDATE … SET result",
        [side("idem", "idem/claim"), side("(b)", "b/claim")], 1.15, WIDE, ("idem", "b")),
    Row("request", "the same with a request",
        "(c) PL/pgSQL function: advisory lock, look-up, hash, INSERT; then UPDATE",
        [side("idem", "idem/request"), side("(c)", "c/request")], 1.5, SOME, ("idem", "c")),
    Row("once", "idem_once around one insert",
        "(a) INSERT key … ON CONFLICT DO NOTHING, the same columns",
        [side("idem", "idem/once"), side("(a)", "a/once")], 1.0, SOME, ("idem", "a")),
    Row("run", "idem_run of a handler with one insert", "the same as four statements",
        [side("idem_run", "idem/run"), side("four statements", "idem/four")], 2.0, SOME, ("idem",)),
    Row("replay", "replay of a completed key", "SELECT … WHERE key = by primary key",
        [side("idem", "idem/replay"), side("SELECT", "b/replay")], 0.95,
        ((8, "off"), (1, "off")), ("idem", "b")),
    Row("hot", "replay, all clients on one key", "SELECT … WHERE key = by primary key",
        [side("idem", "idem/hot"), side("SELECT", "b/hot")], None,
        ((32, "off"),), ("idem", "b")),
]
