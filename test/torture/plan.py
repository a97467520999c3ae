"""What there is to do: operations, drawn from the seed.

The same seed, round and number always give the same operation.  An operation is
worked off in one way, by deliveries of three kinds: "work"; "impostor", which comes
with the operation's key and another request; "look", which only reads the record.
"""

import json
import random
from dataclasses import dataclass, field

STORES = {"long": 600, "short": 6, "idem_completions": 30 * 86400}  # retention, s
WAYS = {
    "claim": 24,
    "once": 8,
    "inbox": 6,
    "run": 12,
    "batch": 6,
    "savepoint": 12,
    "prepared": 8,
    "lease": 12,
    "release": 4,
    "unfinished": 3,
}
POLICIES = ("reconcile", "retry", "skip")


@dataclass
class Operation:
    """A batch is one of these with several keys; each of them counts."""

    number: int
    way: str
    store: str
    keys: list  # (op, key)
    policy: str = ""  # of a lease
    first_sent: bool = False  # is told with every delivery
    unsynced: bool = False  # synchronous_commit = off
    deliveries: list = field(default_factory=list)  # (delay in s, kind)


def operation(seed, round_number, number):
    """Operation `number` of a round."""
    rng = random.Random(f"{seed}/{round_number}/{number}")
    way = rng.choices(list(WAYS), WAYS.values())[0]
    store = rng.choices(list(STORES), (60, 25, 15))[0]
    size = 1
    if way == "batch":  # beyond 32 claims are made good early
        size = rng.choices((2, 3, 5, 8, 40), (30, 30, 25, 12, 3))[0]
    op = Operation(number, way, store, keys(rng, way, round_number, number, size))
    if way == "lease":
        op.policy = rng.choice(POLICIES)
    if way in ("claim", "run"):
        op.first_sent = rng.random() < 0.25
    op.unsynced = way not in ("lease", "prepared") and rng.random() < 0.08

    # Mostly several at once, so that they meet; some come again later.
    burst = rng.choices((1, 2, 3, 6), (25, 40, 25, 10))[0]
    op.deliveries = [(0, "work")] * burst
    op.deliveries += [(rng.uniform(0.05, 3), "work")] * rng.choice((0, 0, 1))
    if store == "short":  # to see when it is forgotten
        op.deliveries += [(i + rng.random(), "work") for i in range(2, 12, 2)]
    if way != "lease" and rng.random() < 0.3:
        op.deliveries.append((rng.uniform(0, 2), "look"))
    if way in ("claim", "savepoint", "prepared") and rng.random() < 0.1:
        op.deliveries.append((rng.uniform(0, 1), "impostor"))
    return op


def keys(rng, way, round_number, number, size):
    odd = rng.choice(("", "", ":é", ":%00", " " * 3 + "x", ":" + "long" * 90))
    result = []
    for i in range(size):
        name = f"{number}.{i}"
        result.append((name, f"r{round_number}:{way}:{name}{odd}"))
    return result


def request(op):
    return json.dumps({"op": op, "amount": 4200})


def describe(op, sent):
    """For the checker: a line for each key; "sent" is the ledger's time."""
    return "".join(
        "\t".join(
            map(
                str,
                (name, key, op.way, op.store, op.policy or "-")
                + (sent if op.first_sent else 0, int(op.unsynced)),
            )
        )
        + "\n"
        for name, key in op.keys
    )


def result_text(rng, attempt):
    """A result as no parser would print it again; some are stored out of line."""
    size = rng.choices((0, 40, 3000, 30000), (60, 30, 8, 2))[0]
    padding = rng.randbytes(size // 2).hex()
    return (
        f'{{"attempt" : "{attempt}", "n":1.10,"big":12345678901234567890123,'
        f' "u": "\\u0000é", "padding":"{padding}", "n":2e1 }}'
    )
