"""A worker of the second story: lease, perform, complete.

Three transactions, each a statement of its own: the lease is committed before
the step that can not be taken back, and the completion comes after it.  Wherever
the worker dies in between, the lease runs out, and the policy that was stated
decides.
"""

import http.client
import json
import os
import random
import signal
from collections import namedtuple

import psycopg

import jobs
from outside.wire import Refused

LEASE_TIME = "1 s"  # twice what the mail server allows a silent client

LEASE = """
    SELECT status, token, idem_provider_key(%(key)s, %(provider)s)::text,
           CASE status WHEN 'in_progress' THEN lease_until
                       WHEN 'uncertain' THEN now() + interval '5 s' END
      FROM idem_try_lease(%(key)s, request => %(request)s::jsonb, lease => %(lease)s,
                          on_uncertain => %(policy)s, retry_window => %(window)s)
"""
COMPLETE = "SELECT idem_complete(%s, %s::json, %s)"
RELEASE = "SELECT idem_release(%s, %s)"

Fault = namedtuple("Fault", "point harm shown")
FAULTS = [
    Fault("leased", "kill", "killed before the send"),
    Fault("half sent", "kill", "killed, half was sent"),
    Fault("unanswered", "kill", "killed before the answer"),
    Fault("sent", "kill", "killed before idem_complete"),
    Fault("completed", "kill", "killed after idem_complete"),
    Fault("leased", "freeze", "frozen before the send"),
    Fault("sent", "freeze", "frozen after the send"),
]
SPARED = 18  # messages for each 7 that meet a fault when first delivered
AGAIN = 0.1  # the share of later deliveries that meet one


def key_of(act, job_id):
    return f"{act}:receipt:job_{job_id}:v1"


def faults_to_come(seed, messages):
    """Who meets which fault at the first delivery: of each kind the same number."""
    fates = [*range(len(FAULTS)), *[None] * SPARED]
    fates = [fates[i % len(fates)] for i in range(messages)]
    random.Random(seed).shuffle(fates)
    return dict(enumerate(fates, 1))


def fault_of(job, seed, to_come):
    if job.delivery == 1:
        return to_come[job.id]
    chance = random.Random(f"{seed}/{job.id}/{job.delivery}")
    return chance.randrange(len(FAULTS)) if chance.random() < AGAIN else None


def work(act, policy, destination, seed, to_come, report):
    def handle(conn, job):
        fault = fault_of(job, seed, to_come)

        def strike(point):
            """Stands still where the fault is to strike: the rest is not ours."""
            if fault is not None and FAULTS[fault].point == point:
                report("struck", fault, job.id, os.getpid())
                os.kill(os.getpid(), signal.SIGSTOP)

        try:
            done = send_once(conn, act, policy, destination, job, strike, report)
        except OSError:  # not even connected: nothing was leased
            report("unreachable", job.id)
            return jobs.give_back(conn, job)
        if done:
            jobs.acknowledge(conn, job)

    jobs.work_off(act, handle, report)


def send_once(conn, act, policy, destination, job, strike, report):
    """Returns whether the job is done with.  Otherwise it will come again."""
    key = key_of(act, job.id)
    request = {"customer": job.customer, "amount": job.amount}
    with destination.connect(job, strike) as session:
        status, token, identity, again = conn.execute(
            LEASE,
            {
                "key": key,
                "provider": destination.provider,
                "request": json.dumps(request),
                "lease": LEASE_TIME,
                "policy": policy,
                "window": destination.retry_window,
            },
        ).fetchone()
        if again:  # somebody is at it, or a decision is needed first
            jobs.put_off(conn, job, again)
            return False
        if status != "leased":  # completed or skipped
            return True

        report("leased", job.id)
        try:
            strike("leased")
            result = session.perform(identity, job)
            strike("sent")
        except Refused:  # nothing was sent: the next one may try at once
            conn.execute(RELEASE, (key, token))
            report("released", job.id)
            return False
        except (OSError, http.client.HTTPException):  # nobody knows
            report("cut-off", job.id)
            return False

    try:
        conn.execute(COMPLETE, (key, json.dumps(result), token))
    except psycopg.Error as error:
        if error.sqlstate != "ID005":
            raise
        report("superseded", job.id)  # the lease ran out, and others decided
        return False
    report("completed", job.id)
    strike("completed")
    return True
