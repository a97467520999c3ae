"""The double-billing story.

A queue delivers invoice jobs at least once to worker processes.  Workers are
killed and paused, their backends terminated, their acknowledgements lost.  Act
one handles the jobs as many people do; act two claims an idempotency key first.
Every figure is counted afterwards, from the tables and from what the workers
reported.  The seed decides who is hit; what it is doing then is chance.
"""

import os
import pathlib
import random
import signal
import statistics
import time

import jobs
import stage
from billing import handlers, worker

ACTS = [  # the schema an act plays in, how it is called, its handler
    ("naive", "naive handler", handlers.naive),
    ("idem", "with idem", handlers.idem),
]
FAULTS = {  # as they are counted, when they have had their effect, and shown
    "killed": "workers killed (-9)",
    "paused": "workers paused",
    "disconnected": "backends terminated",
    "lost-ack": "acknowledgements lost",
}
ENCORE = 500  # jobs to time the handlers with
FAULT_EVERY = (10, 70)  # reports from workers between two faults: 20 jobs or so
SCHEMA_SQL = pathlib.Path(__file__).with_name("schema.sql")


class Act(stage.Act):
    """Workers that bill, and are harmed by chance."""

    schema_sql = SCHEMA_SQL

    def __init__(self, db, schema, title, handler, options):
        super().__init__(db, schema, title, options.jobs, options.workers)
        self.handler, self.seed = handler, options.seed
        self.random = random.Random(f"{options.seed}/{schema}")
        self.suppressed = 0  # deliveries answered without doing the work
        self.told = {}  # job -> the invoice numbers that handlers answered
        self.until_fault = self.random.randint(*FAULT_EVERY)

    def work(self):
        report = jobs.reporter(self.pipe)
        worker.work(self.schema, self.handler, self.seed, report)

    def note(self, kind, *words):
        self.until_fault -= 1
        if kind == "handled":
            job, ran, number = words
            self.told.setdefault(job, set()).add(int(number))
            self.suppressed += ran == "0"

    def step(self):
        """Harms a worker, or a worker's backend, whatever it is doing."""
        if self.until_fault > 0:
            return
        self.until_fault = self.random.randint(*FAULT_EVERY)
        # Workers have just reported: hit them a little later, anywhere.
        time.sleep(self.random.uniform(0, 0.01))
        self.random.choice([self.kill, self.pause, self.terminate])()

    def kill(self):
        self.random.choice(self.workers).kill()  # kill -9

    def pause(self):
        process = self.random.choice(self.workers)
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)

    def terminate(self):
        pids = self.backends()
        if pids:
            pid = self.random.choice(pids)
            self.db.execute("SELECT pg_terminate_backend(%s)", (pid,))

    def died(self, status):
        kinds = {-signal.SIGKILL: "killed", worker.LOST_ACK: "lost-ack"}
        self.seen[kinds.get(status)] += 1
        return status in kinds

    def faults(self):
        return sum(self.seen[fault] for fault in FAULTS)

    def count(self):
        """The outcome, from the tables and the reports."""
        total, deliveries, twice, lost = self.db.execute(
            """
            SELECT count(*), sum(deliveries),
                   count(*) FILTER (WHERE invoices > 1),
                   count(*) FILTER (WHERE invoices = 0)
              FROM (SELECT job.id, deliveries, count(no) AS invoices
                      FROM job LEFT JOIN invoice ON invoice.job = job.id
                     GROUP BY job.id) AS per_job
            """
        ).fetchone()
        numbers = {}
        for job, number in self.db.execute("SELECT job::text, no FROM invoice"):
            numbers.setdefault(job, set()).add(number)
        return {
            "jobs": total,
            "deliveries": int(deliveries),
            **{row: self.seen[fault] for fault, row in FAULTS.items()},
            "invoices made": sum(map(len, numbers.values())),
            "billed twice": twice,
            "lost": lost,
            "suppressed": self.suppressed,
            "contradictory answers": sum(
                not answers <= numbers.get(job, set()) or len(answers) > 1
                for job, answers in self.told.items()
            ),
        }


def encore(db, first_id):
    """What idem costs: both handlers by turns, undisturbed, on new jobs.

    Returns the seconds that each handler took, job by job.  Timed in the acts,
    one after the other, they would show how busy the machine was meanwhile.
    """
    stage.set_the_stage(db, "encore", 0, SCHEMA_SQL)
    spent = {schema: [] for schema, _, _ in ACTS}
    with jobs.connect("encore") as conn:
        for i in range(ENCORE):
            job = jobs.Job(first_id + i, "customer", 4200, 1)
            for schema, _, handler in ACTS if i % 2 else ACTS[::-1]:
                start = time.perf_counter()
                handler(conn, job)
                spent[schema].append(time.perf_counter() - start)
    return list(spent.values())


def print_table(outcomes, times):
    def median_ms(seconds, form):
        return f"{statistics.median(seconds) * 1000:{form}} ms"

    rows = [(name, [outcome[name] for outcome in outcomes]) for name in outcomes[0]]
    rows.append(("median time a job", [median_ms(each, ".2f") for each in times]))
    added = [b - a for a, b in zip(*times)]  # job by job
    rows.append(("median added time", ["-", median_ms(added, "+.2f")]))
    stage.print_table([title for _, title, _ in ACTS], rows)


def complaints(naive, idem):
    """What keeps this run from showing what it set out to show."""
    for title, outcome in ("naive handler", naive), ("idem", idem):
        for fault in FAULTS.values():
            if outcome[fault] == 0:
                yield f"{title}: {fault}: none, so nothing was put to the test"
    if naive["billed twice"] == 0:
        yield "the naive handler billed nobody twice: the faults did no harm"
    if idem["suppressed"] == 0:
        yield "idem had no duplicate to suppress"
    for row in "billed twice", "lost", "contradictory answers":
        if idem[row] != 0:
            yield f"idem: {row}: {idem[row]}"
    if idem["invoices made"] != idem["jobs"]:
        yield f"idem: {idem['invoices made']} invoices for {idem['jobs']} jobs"


def tell(db, options):
    """Tells the story; returns what went wrong."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for workers, once they are ready
    print(
        f"{options.jobs:,} invoice jobs, {options.workers} workers,"
        f" seed {options.seed}",
        flush=True,
    )
    outcomes = [Act(db, *act, options).play() for act in ACTS]
    print_table(outcomes, encore(db, options.jobs + 1))
    failures = list(complaints(*outcomes))
    if not failures:
        print("\nWith idem each job was billed once, whatever died.")
    return failures
