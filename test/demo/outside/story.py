"""Effects outside the database: what was sent can not be taken back.

Workers send receipts through a mail server, and are killed or frozen before,
during and after the send.  A receipt whose sender is gone may have been sent or
not, and nobody knows; the policy that was stated for that moment decides, and
each of the three has its act.  A fourth act charges cards at a provider that
knows idempotency keys.  Every figure is counted from the folder that the mail
server delivers into, from the log of the provider, and from the tables.
"""

import os
import signal
import sys
import tempfile
import time

import jobs
import stage
from outside import reconciler, worker
from outside.mail import Mail
from outside.payments import Payments

ACTS = [  # the schema an act plays in, how it is called, policy, destination
    ("skip", "email skip", "skip", Mail),
    ("retry", "email retry", "retry", Mail),
    ("reconcile", "email reconcile", "reconcile", Mail),
    ("charge", "charge retry", "retry", Payments),
]
LOOK_EVERY = 0.05  # seconds


class Act(stage.Act):
    """Workers that send, and are struck at points chosen before."""

    def __init__(self, db, schema, title, policy, destination, options):
        super().__init__(db, schema, title, options.messages, options.workers)
        self.policy, self.destination = policy, destination
        self.seed = options.seed
        self.jobs_by_key = {
            worker.key_of(schema, job): job for job in range(1, self.size + 1)
        }
        self.to_come = worker.faults_to_come(options.seed, options.messages)
        self.struck = [0] * len(worker.FAULTS)
        self.frozen = {}  # process -> the job it holds
        self.woken = 0
        self.open = set()  # keys leased and not completed, as far as reported
        self.listed = set()  # keys that have waited for a decision
        self.there = self.not_there = 0  # decisions
        self.wrong = []  # what should not have been seen on the way
        self.next_look = 0

    def work(self):
        worker.work(
            self.schema,
            self.policy,
            self.destination,
            self.seed,
            self.to_come,
            jobs.reporter(self.pipe),
        )

    def note(self, kind, *words):
        if kind == "struck":
            self.strike(*map(int, words))
        elif kind == "leased":
            self.open.add(worker.key_of(self.schema, words[0]))
        elif kind in ("completed", "released"):
            self.open.discard(worker.key_of(self.schema, words[0]))

    def strike(self, fault, job, pid):
        """The worker stands still where it is to be hit."""
        (process,) = [p for p in self.workers if p.pid == pid]
        self.struck[fault] += 1
        if worker.FAULTS[fault].harm == "kill":
            process.kill()  # kill -9
        else:
            self.frozen[process] = job
            self.workers.append(stage.start(self.work))

    def died(self, status):
        self.seen["killed"] += status == -signal.SIGKILL
        return status == -signal.SIGKILL

    def faults(self):
        return sum(self.struck)

    def step(self):
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + LOOK_EVERY
        self.wake()
        if self.policy == "reconcile":
            self.reconcile()

    def wake(self):
        """Frozen workers go on once somebody else has dealt with their job."""
        done = self.db.execute(
            "SELECT id FROM job WHERE acked AND id = ANY (%s)",
            (list(self.frozen.values()),),
        ).fetchall()
        for process in [p for p, job in self.frozen.items() if (job,) in done]:
            del self.frozen[process]
            os.kill(process.pid, signal.SIGCONT)
            self.woken += 1

    def waiting(self):
        """The keys of jobs not acknowledged, and the keys that idem lists."""
        unacked, listed = self.db.execute(
            """
            SELECT (SELECT array_agg(id) FROM job WHERE NOT acked),
                   (SELECT array_agg(key) FROM idem_uncertain)
            """
        ).fetchone()
        keys = {worker.key_of(self.schema, job) for job in unacked or []}
        return keys, set(listed or [])

    def reconcile(self):
        """Has decided what waits, once nothing else is left to do.

        By then idem must list exactly what was left open, which is known from
        the workers' reports and from the queue; and every other message must
        have been delivered once.
        """
        unacked, listed = self.waiting()
        if not listed or not listed == unacked == self.open:
            return
        deliveries = self.deliveries()
        others = [n for key, n in deliveries.items() if key not in listed]
        if not self.listed:
            print(
                f"{self.title:15} {len(listed)} messages wait for a decision:"
                f" {sum(deliveries[key] > 0 for key in listed)} of these were"
                f" delivered; of the other {len(others)}, {others.count(1)} were,"
                " once",
                flush=True,
            )
        if set(others) != {1}:
            self.wrong.append("a message was lost or sent twice, and not listed")
        self.listed |= listed
        there, not_there = reconciler.settle(self.db, self.destination)
        self.open.difference_update(there, not_there)
        self.db.execute(  # back into the queue
            "UPDATE job SET visible_at = now() WHERE id = ANY (%s)",
            ([self.jobs_by_key[key] for key in there + not_there],),
        )
        self.there += len(there)
        self.not_there += len(not_there)

    def stalled(self):
        unacked, listed = self.waiting()
        sys.exit(
            f"{self.title}: nothing moves any more\n"
            f"not acknowledged: {sorted(unacked)}\n"
            f"listed as uncertain: {sorted(listed)}\n"
            f"left open: {sorted(self.open)}"
        )

    def deliveries(self):
        """How often each message has arrived, by key."""
        arrived = self.destination.arrived()
        rows = self.db.execute(
            "SELECT k, idem_provider_key(k, %s)::text FROM unnest(%s::text[]) k",
            (self.destination.provider, list(self.jobs_by_key)),
        )
        return {key: arrived[identity] for key, identity in rows}

    def count(self):
        """The outcome, from destination, tables and reports."""
        deliveries = self.deliveries()
        keys = list(deliveries)
        skipped = self.db.execute(
            """
            SELECT k FROM unnest(%s::text[]) k, idem_lookup(k) WHERE status = 'skipped'
            """,
            (keys,),
        ).fetchall()
        missing = [key for key, n in deliveries.items() if n == 0]
        if self.policy == "skip" and not set(missing) <= {key for (key,) in skipped}:
            self.wrong.append("a message is missing that is not marked as skipped")
        if self.seen["killed"] + self.woken != sum(self.struck):
            self.wrong.append("not every fault has struck")
        stray = set(self.destination.arrived()) - self.identities(keys)
        if stray:
            self.wrong.append(f"{len(stray)} unknown messages arrived")
        return {
            "messages": self.size,
            **{f.shown: n for f, n in zip(worker.FAULTS, self.struck)},
            "late holders told ID005": self.seen["superseded"],
            "late holders cut off": self.seen["cut-off"],
            "given up (skipped)": len(skipped),
            "waited for a decision": len(self.listed),
            "of these: had been sent": self.there,
            "of these: had not": self.not_there,
            "answered by the provider's key": self.replayed(),
            "delivered": self.size - len(missing),
            "duplicated": sum(n > 1 for n in deliveries.values()),
            "missing": len(missing),
            "undecided at the end": len(self.waiting()[1]),
        }

    def identities(self, keys):
        rows = self.db.execute(
            "SELECT idem_provider_key(k, %s)::text FROM unnest(%s::text[]) k",
            (self.destination.provider, keys),
        )
        return {identity for (identity,) in rows}

    def replayed(self):
        if isinstance(self.destination, Payments):
            return self.destination.answered(replayed=True).total()
        return 0


def play(db, schema, title, policy, destination_class, options):
    """Plays an act against a destination of its own: outcome and complaints."""
    with tempfile.TemporaryDirectory(prefix="idem-demo.") as directory:
        destination = destination_class(directory)
        server = stage.start(destination.serve)
        destination.listener.close()  # ours; the server has its own
        try:
            act = Act(db, schema, title, policy, destination, options)
            outcome = act.play()
            return outcome, [f"{title}: {what}" for what in dict.fromkeys(act.wrong)]
        finally:
            server.kill()
            server.join()


def complaints(skip, retry, reconcile, charge):
    """What keeps this run from showing what it set out to show."""
    outcomes = skip, retry, reconcile, charge
    for (_, title, _, _), outcome in zip(ACTS, outcomes):
        for fault in worker.FAULTS:
            if outcome[fault.shown] == 0:
                yield f"{title}: {fault.shown}: none, so nothing was put to the test"
        if outcome["undecided at the end"] != 0:
            yield f"{title}: undecided at the end: {outcome['undecided at the end']}"

    def must_be(title, outcome, zero=(), above_zero=()):
        for row in zero:
            if outcome[row] != 0:
                yield f"{title}: {row}: {outcome[row]}"
        for row in above_zero:
            if outcome[row] == 0:
                yield f"{title}: {row}: none, so nothing was put to the test"

    yield from must_be(
        "skip", skip, ["duplicated"], ["given up (skipped)", "missing"]
    )
    yield from must_be(
        "retry", retry, ["missing"], ["duplicated", "late holders told ID005"]
    )
    yield from must_be(
        "reconcile",
        reconcile,
        ["duplicated", "missing"],
        ["waited for a decision", "of these: had been sent", "of these: had not"],
    )
    yield from must_be(
        "charge",
        charge,
        ["duplicated", "missing"],
        ["answered by the provider's key", "late holders told ID005"],
    )


def tell(db, options):
    """Tells the story; returns what went wrong."""
    print(
        f"{options.messages:,} messages, {options.workers} workers,"
        f" seed {options.seed}",
        flush=True,
    )
    played = [play(db, *act, options) for act in ACTS]
    outcomes = [outcome for outcome, _ in played]
    failures = [failure for _, failures in played for failure in failures]
    failures += complaints(*outcomes)
    titles = [title for _, title, _, _ in ACTS]
    rows = [(name, [outcome[name] for outcome in outcomes]) for name in outcomes[0]]
    stage.print_table(titles, rows)
    if not failures:
        print(
            "\nskip sent nothing twice, retry lost nothing, reconcile did neither,"
            "\nand with a provider that knows the key retry did neither, too."
        )
    return failures
