"""Every way in for effects inside the database.

Each takes an Attempt and returns whether the delivery is acknowledged: the operation
is known to be done.  An error that is not caught here ends the attempt.  A "~" after
the attempt marks an effect that must never be seen.
"""

import psycopg

import plan
from ledger import digest

CLAIM = """
    SELECT claimed, status, result::text
      FROM {function}(%s, request => %s::jsonb, wait => %s::interval,
                      first_sent => to_timestamp(%s::float8), store => %s)
"""
FINAL = ("completed", "skipped", "too_late")


def begin(a):
    levels = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
    level = a.rng.choices(levels, (70, 15, 15))[0]
    a.sql(f"BEGIN ISOLATION LEVEL {level}")
    if a.job["unsynced"]:
        a.sql("SET LOCAL synchronous_commit = off")
    if level != "READ COMMITTED":  # the snapshot is taken before the claim
        a.sql("SELECT FROM effect WHERE op = %s", next(iter(a.ops)))
        a.pause()


def ask(a, op, request=None):
    """Claims; returns claimed and status."""
    function = "idem_claim" if a.rng.random() < 0.7 else "idem_try_claim"
    wait = a.rng.choices((None, "0", "50 ms", "1 s"), (30, 30, 30, 10))[0]
    if a.job["way"] == "prepared":  # whoever has it may take seconds
        wait = a.rng.choice(("0", "50 ms", "300 ms"))
    claimed, status, result = a.tell(
        op, CLAIM.format(function=function), a.ops[op], request or plan.request(op),
        wait, a.job["first_sent"], a.job["store"],
    )
    told(a, op, status, claimed, result)
    return claimed, status


def told(a, op, status, claimed, result):
    if not a.told_by_error:
        value = digest(result) if status == "completed" and not claimed else "?"
        a.note("told", op, status, int(claimed), value)


def effect(a, op, result, undone=False):
    a.sql("INSERT INTO effect VALUES (%s, %s, %s)",
          op, a.id + "~" * undone, digest(result))


def complete(a, op, result):
    (stored,) = a.sql("SELECT idem_complete(%s, %s, store => %s)::text",
                      a.ops[op], result, a.job["store"]).fetchone()
    if stored != result:
        a.note("wrong", op, "idem_complete returned something else")


def not_claimed(a, status):
    """Nothing to do: the transaction ends, and the answer says what is known."""
    if a.conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        a.sql("COMMIT")
    return status in FINAL


def claim(a):
    (op,) = a.ops
    begin(a)
    claimed, status = ask(a, op)
    if not claimed:
        return not_claimed(a, status)
    result = plan.result_text(a.rng, a.id)
    a.pause()
    effect(a, op, result)
    complete(a, op, result)
    a.pause()
    return a.commit()


def once(a):
    (op,) = a.ops
    begin(a)
    row = a.tell(op, "SELECT idem_once(%s, %s::jsonb, %s)",
                 a.ops[op], plan.request(op), a.job["store"])
    if a.told_by_error:
        return not_claimed(a, row[1])
    a.note("told", op, "claimed" if row[0] else "completed", int(row[0]), "?")
    if not row[0]:
        return not_claimed(a, "completed")
    a.pause()
    effect(a, op, None)
    return a.commit()


def inbox(a):
    """A single statement: claim, effect and completion commit together."""
    (op,) = a.ops
    a.note("send")
    row = a.tell(
        op,
        """
        WITH new AS (INSERT INTO effect SELECT %s, %s, '-'
                      WHERE idem_once(%s, store => %s) RETURNING 1)
        SELECT count(*) > 0 FROM new
        """,
        op, a.id, a.ops[op], a.job["store"],
    )
    if a.told_by_error:
        return not_claimed(a, row[1])
    a.note("told", op, "claimed" if row[0] else "completed", int(row[0]), "?")
    if row[0]:
        a.note("done")
    return True


def run(a):
    (op,) = a.ops
    result = plan.result_text(a.rng, a.id)
    a.sql("SELECT set_config('torture.attempt', %s, false),"
          " set_config('torture.result', %s, false)", a.id, result)
    single = a.rng.random() < 0.6 and not a.job["unsynced"]
    if single:
        a.note("send")
    else:
        begin(a)
    claimed, status, stored = a.tell(
        op, CLAIM.format(function="idem_run").replace("(%s,", "(%s, 'handler',"),
        a.ops[op], plan.request(op), a.rng.choice((None, "100 ms")),
        a.job["first_sent"], a.job["store"],
    )
    told(a, op, status, claimed, stored)
    if claimed and stored != result:
        a.note("wrong", op, "idem_run returned something else")
    if not claimed:
        return not_claimed(a, status)
    if single:
        a.note("done")
        return True
    a.pause()
    return a.commit()


def batch(a):
    ops = list(a.ops)
    a.rng.shuffle(ops)
    if a.rng.random() < 0.2:
        ops.append(ops[0])  # a key twice is claimed once
    begin(a)
    for op in a.ops:
        a.note("ask", op)
    rows = a.sql(
        """
        SELECT ordinality, claimed, status, result::text
          FROM idem_claim_batch(%s::text[], %s::jsonb[], %s::interval, %s)
        """,
        [a.ops[op] for op in ops], [plan.request(op) for op in ops],
        a.rng.choice((None, "0", "200 ms")), a.job["store"],
    ).fetchall()
    done, mine = True, []
    for number, claimed, status, stored in rows:
        op = ops[number - 1]
        if status == "held" and number == len(a.ops) + 1:
            continue
        value = digest(stored) if status == "completed" else "?"
        a.note("told", op, status, int(claimed), value)
        if claimed:
            mine.append(op)
        done = done and (claimed or status in FINAL)
    if len(rows) != len(ops):
        a.note("wrong", ops[0], f"{len(rows)} answers to {len(ops)} keys")
    a.pause()
    results = [plan.result_text(a.rng, a.id) for _ in mine]
    a.sql("INSERT INTO effect SELECT op, %s, d FROM unnest(%s::text[], %s::text[]) u (op, d)",
          a.id, mine, [digest(result) for result in results])
    a.sql("SELECT idem_complete(k, r, store => %s) FROM unnest(%s::text[], %s::text[]) u (k, r)",
          a.job["store"], [a.ops[op] for op in mine], results)
    good = a.commit()
    return done and (good or not mine)


def savepoint(a):
    (op,) = a.ops
    variant = a.rng.randrange(6)
    result = plan.result_text(a.rng, a.id)
    begin(a)
    if variant in (0, 1):
        a.sql("SAVEPOINT s")
    claimed, status = ask(a, op)
    if not claimed:
        return not_claimed(a, status)
    if variant == 0:  # claim and completion are undone together
        effect(a, op, result, undone=True)
        complete(a, op, result)
        a.note("undo", op)
        a.sql("ROLLBACK TO s")
        a.pause()
        claimed, status = ask(a, op)
        if not claimed:
            return not_claimed(a, status)
    elif variant == 1:
        a.sql("RELEASE s")
    elif variant in (2, 5):  # only the completion is undone
        a.sql("SAVEPOINT s")
        effect(a, op, result, undone=True)
        complete(a, op, result)
        a.sql("ROLLBACK TO s")
        if variant == 5:
            return unfinished_commit(a, op)
    elif variant == 3:  # a release that is undone
        a.sql("SAVEPOINT s")
        a.sql("SELECT idem_release(%s, store => %s)", a.ops[op], a.job["store"])
        a.sql("ROLLBACK TO s")
    elif variant == 4:  # an error in between
        a.sql("SAVEPOINT s")
        effect(a, op, result, undone=True)
        try:
            a.sql("SELECT 1 / 0")
        except psycopg.errors.DivisionByZero:
            a.sql("ROLLBACK TO s")
    a.pause()
    effect(a, op, result)
    complete(a, op, result)
    return a.commit()


def prepared(a):
    """Another process commits it, or rolls it back: see Attempt.finish()."""
    (op,) = a.ops
    begin(a)
    claimed, status = ask(a, op)
    if not claimed:
        return not_claimed(a, status)
    result = plan.result_text(a.rng, a.id)
    effect(a, op, result)
    complete(a, op, result)
    a.pause()
    a.sql(f"PREPARE TRANSACTION '{a.id}'")
    return {"done": False, "prepared": a.id}


def release(a):
    """Half of the deliveries give up at first."""
    (op,) = a.ops
    if a.rng.random() < 0.5:
        return claim(a)
    begin(a)
    claimed, status = ask(a, op)
    if not claimed:
        return not_claimed(a, status)
    a.pause()
    (released,) = a.sql("SELECT idem_release(%s, store => %s)",
                        a.ops[op], a.job["store"]).fetchone()
    if not released:
        a.note("wrong", op, "idem_release did not know the claim")
    a.sql("COMMIT")
    return False


def unfinished(a):
    (op,) = a.ops
    if a.rng.random() < 0.5:
        return claim(a)
    begin(a)
    claimed, status = ask(a, op)
    if not claimed:
        return not_claimed(a, status)
    effect(a, op, None, undone=True)
    return unfinished_commit(a, op)


def unfinished_commit(a, op):
    """COMMIT has to fail, and takes everything back."""
    try:
        a.sql("COMMIT")
    except psycopg.Error as error:
        if error.sqlstate != "ID006":
            raise
    else:
        a.note("wrong", op, "COMMIT with an unfinished claim")
    return False


def impostor(a):
    """The operation's key with another request: never answered with its result."""
    (op,) = a.ops
    a.id += "!"
    begin(a)
    claimed, status = ask(a, op, request='{"amount": 1}')
    if claimed:
        a.sql("ROLLBACK")
        return False
    if status in ("completed", "skipped"):
        a.note("wrong", op, f"another request was told {status}")
    return not_claimed(a, status) or status == "key_reused"


def look(a):
    """Done with once it has found a record, or after some time."""
    query = "SELECT status, result::text FROM idem_lookup(%s, %s)"
    on_standby = a.rng.random() < 0.2
    servers = a.worker.servers
    conn = servers.connect(servers.standby(), connect_timeout=5) if on_standby else a.conn
    for op in a.ops:
        a.note("look", op)
        if on_standby:
            conn.execute(f"SET search_path = {a.worker.schema}, public")
        row = conn.execute(query, (a.ops[op], a.job["store"])).fetchone()
        status, result = row or ("absent", None)
        if row or not on_standby:  # there, no answer says nothing
            a.note("saw", op, status, digest(result))
    if on_standby:
        conn.close()
    return status == "completed" or a.job["try"] > 5
