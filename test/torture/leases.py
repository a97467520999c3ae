"""Effects outside the database: lease, send, complete; and who decides afterwards."""

import json
import os
import signal
import time

import psycopg

import plan
from ledger import digest
from provider import Call

PATIENCE = 0.3  # s, of the provider beyond the lease; see decide()
LEASE = """
    SELECT claimed, status, result::text, token,
           extract(epoch FROM lease_until)::float8
      FROM {function}(%s, request => %s::jsonb, lease => %s::interval,
                      on_uncertain => %s, retry_window => %s::interval, store => %s)
"""
LOOKUP = """
    SELECT token, clock_timestamp() > lease_until + %s * interval '1 s'
      FROM idem_lookup(%s, %s) WHERE status = 'leased'
"""


def lease(a):
    ((op, key),) = a.ops.items()
    policy = a.job["policy"]
    seconds = a.rng.choice((0.3, 0.6, 1))
    identity = a.sql("SELECT idem_provider_key(%s, 'torture')::text", key).fetchone()[0]
    window = "3 s" if policy == "retry" and a.job["number"] % 2 else None
    function = "idem_try_lease" if a.rng.random() < 0.7 else "idem_lease"

    # What can be taken back comes first: the connection.
    with Call(a.worker.provider, seconds + PATIENCE) as provider:
        answer = a.tell(
            op, LEASE.format(function=function), key, plan.request(op),
            f"{seconds} s", policy, window, a.job["store"],
        )
        claimed, status, stored = answer[:3]
        if not a.told_by_error:
            token, until = answer[3:]
            value = digest(stored) if status == "completed" else "?"
            a.note("told", op, status, int(claimed), value, token, until)
        if not claimed:
            if status == "uncertain":
                decide(a, op, key, provider, identity)
            return status in ("completed", "skipped")

        falter(a)
        if a.rng.random() < 0.2:
            extend(a, op, key, token)
        word = "again" if policy == "retry" else "send"
        answer = provider.ask(word, identity, a.id)
        if answer == "late":  # known not to have happened
            a.note("give", op)
            a.sql("SELECT idem_release(%s, %s, %s)", key, token, a.job["store"])
            return False
    charge = answer.split()[1]
    falter(a)
    try:
        if a.rng.random() < 0.2:
            a.sql("SELECT idem_checkpoint(%s, %s, %s::jsonb, %s)",
                  key, token, json.dumps({"charge": charge}), a.job["store"])
        result = result_of(charge)
        a.sql("BEGIN")
        a.sql("SELECT idem_complete(%s, %s, %s, %s)", key, result, token, a.job["store"])
        effect(a, op, result)
        return a.commit()
    except psycopg.Error as error:
        return superseded(a, error)


def falter(a):
    """The nemesis seldom hits the few milliseconds that a lease is for."""
    fate = a.rng.random()
    if fate < 0.04:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fate < 0.12:
        time.sleep(a.rng.uniform(0.3, 2))  # to beyond its end
    else:
        a.pause()


def extend(a, op, key, token):
    """To later than before, so it is enough to note the end that is told."""
    try:
        (until,) = a.sql(
            "SELECT extract(epoch FROM idem_extend(%s, %s, '1200 ms', %s))::float8",
            key, token, a.job["store"],
        ).fetchone()
        a.note("told", op, "extended", 0, "?", token, until)
    except psycopg.Error as error:
        superseded(a, error)


def superseded(a, error):
    """ID005: the lease ran out, and others have decided.  It comes again."""
    if error.sqlstate != "ID005":
        raise error
    a.sql("ROLLBACK")
    return False


def result_of(charge):
    return f'{{"charge" : {charge} }}'


def effect(a, op, result):
    """Unless it is there: a reconciler may have completed it, with the same token.

    Repeating a completion is no error, so what goes with it has to look for itself,
    after idem_complete, which has waited for the other one.
    """
    a.sql(
        """
        INSERT INTO effect SELECT %s, %s, %s
         WHERE NOT EXISTS (SELECT FROM effect WHERE op = %s AND digest = %s)
        """,
        op, a.id, digest(result), op, digest(result),
    )


def decide(a, op, key, provider, identity):
    """The reconciler: asks the provider, then says so.

    Not before the provider has hung up on whoever held the lease: it may wake up
    one line before its send.
    """
    row = a.sql(LOOKUP, PATIENCE, key, a.job["store"]).fetchone()
    if row is None or not row[1]:
        return
    charge = provider.ask("find", identity)
    happened = charge != "none"
    result = result_of(charge) if happened else None
    a.note("give", op)
    try:
        a.sql("BEGIN")
        (token,) = a.sql("SELECT token FROM idem_resolve(%s, %s, %s::text, %s)",
                         key, happened, result, a.job["store"]).fetchone()
        if token != row[0]:  # another attempt was made meanwhile
            a.sql("ROLLBACK")
            return
        if happened:
            effect(a, op, result)
        a.commit()
    except psycopg.Error as error:
        if error.sqlstate != "ID002":
            superseded(a, error)
        else:
            a.sql("ROLLBACK")
