"""A worker's side of the queue: take a job, handle it, acknowledge it.

The queue keeps one promise: what was not acknowledged comes again.
"""

import os
import time
from collections import namedtuple

import psycopg

APPLICATION = "idem demo worker"
VISIBILITY_TIMEOUT = "500 ms"

Job = namedtuple("Job", "id customer amount delivery")


def connect(schema):
    return psycopg.connect(
        autocommit=True,
        application_name=APPLICATION,
        options=f"-c search_path={schema},public",
    )


def reporter(pipe):
    """Returns a function that tells the conductor what happens, as it happens.

    A worker may be killed at any point, so each report is one write() to a
    pipe: that is atomic, and what was written survives the writer.
    """

    def report(*words):
        os.write(pipe, (" ".join(map(str, words)) + "\n").encode())

    return report


def work_off(schema, handle, report):
    """Handles jobs until all are acknowledged, or the conductor is gone."""
    conductor = os.getppid()
    conn = None
    while os.getppid() == conductor:
        try:
            if conn is None:
                conn = connect(schema)
            job = deliver(conn)
            if job:
                handle(conn, job)
            elif all_acked(conn):
                return
            else:
                time.sleep(0.05)  # an empty poll: the rest is hidden for now
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


def give_back(conn, job):
    """Has the job come again at once, as if it had not been delivered."""
    conn.execute(
        """
        UPDATE job SET visible_at = now(), deliveries = deliveries - 1 WHERE id = %s
        """,
        (job.id,),
    )


def put_off(conn, job, until):
    """Has the job come again at that time, rather than soon."""
    conn.execute("UPDATE job SET visible_at = %s WHERE id = %s", (until, job.id))


def acknowledge(conn, job):
    conn.execute("UPDATE job SET acked = true WHERE id = %s", (job.id,))


def all_acked(conn):
    return conn.execute(
        "SELECT NOT EXISTS (SELECT FROM job WHERE NOT acked)"
    ).fetchone()[0]
