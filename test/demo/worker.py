"""A worker process: takes jobs from the queue, handles and acknowledges them.

It keeps no promise but the queue's: what was not acknowledged comes again.
It may be killed at any point, so it reports each step as it happens, with one
write() to a pipe: that is atomic, and what was written survives the writer.
"""

import os
import random
import signal
import time
from collections import namedtuple

import psycopg

APPLICATION = "idem demo worker"
VISIBILITY_TIMEOUT = "500 ms"
PAUSE = 0.8  # seconds: its job will be delivered to another worker, too
LOST_ACKS = 0.03  # the share of deliveries whose acknowledgement is lost
LOST_ACK = 75  # the exit status of a worker that died over one

Job = namedtuple("Job", "id customer amount delivery")


def work(schema, handler, seed, pipe):
    """Works until every job is acknowledged, or the conductor is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the conductor's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    conductor = os.getppid()

    def report(*words):
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    def pause(*_):  # wherever it is, as a stalled machine would
        report("paused")
        time.sleep(PAUSE)

    signal.signal(signal.SIGUSR1, pause)
    conn = None
    while os.getppid() == conductor:
        try:
            if conn is None:
                conn = connect(schema)
            job = deliver(conn)
            if job:
                handle(conn, job, handler, seed, report)
            elif all_acked(conn):
                return
            else:
                time.sleep(0.02)  # an empty poll: the rest is hidden for now
        except psycopg.Error as error:
            # A lost connection, a deadlock, an operation still in progress:
            # the job is not acknowledged, so it comes again.  Any other error
            # is a bug, and ends the demo.
            if not isinstance(error, psycopg.OperationalError) and (
                error.sqlstate != "ID002"
            ):
                raise
            if conn and conn.closed:
                report("disconnected")
                conn = None


def handle(conn, job, handler, seed, report):
    ran, number = handler(conn, job)
    report("handled", job.id, int(ran), number)

    # A lost acknowledgement: the work is committed, the queue never hears of
    # it.  Which ones are lost depends on the seed alone, not on timing.
    if random.Random(f"{seed}/{job.id}/{job.delivery}").random() < LOST_ACKS:
        os._exit(LOST_ACK)

    conn.execute("UPDATE job SET acked = true WHERE id = %s", (job.id,))
    report("acked", job.id)


def connect(schema):
    return psycopg.connect(
        autocommit=True,
        application_name=APPLICATION,
        options=f"-c search_path={schema},public",
    )


def deliver(conn):
    """The next visible job, or None.  Committed before anyone works on it."""
    row = conn.execute(
        f"""
        UPDATE job
           SET visible_at = now() + interval '{VISIBILITY_TIMEOUT}',
               deliveries = deliveries + 1
         WHERE id = (SELECT id FROM job
                      WHERE NOT acked AND visible_at <= now()
                      ORDER BY id
                      LIMIT 1
                        FOR UPDATE SKIP LOCKED)
        RETURNING id, customer, amount, deliveries
        """
    ).fetchone()
    return Job(*row) if row else None


def all_acked(conn):
    return conn.execute(
        "SELECT NOT EXISTS (SELECT FROM job WHERE NOT acked)"
    ).fetchone()[0]
