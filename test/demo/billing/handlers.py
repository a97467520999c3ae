"""The same handler twice: bill a job, in one transaction.

A handler gets an open connection and a job, and answers whether it did the
work now, and the number of the invoice.  Between the two there is only idem.
"""

import json


def naive(conn, job):
    with conn.transaction():
        number = insert_invoice(conn, job)
    return True, number


def idem(conn, job):
    key = f"invoice:job_{job.id}:v1"
    request = json.dumps({"customer": job.customer, "amount": job.amount})

    with conn.transaction():
        claimed, result = conn.execute(
            "SELECT claimed, result FROM idem_claim(%s, request => %s::jsonb)",
            (key, request),
        ).fetchone()
        if claimed:
            number = insert_invoice(conn, job)
            result = {"invoice": number}
            conn.execute(
                "SELECT idem_complete(%s, %s::json)", (key, json.dumps(result))
            )
    return claimed, result["invoice"]


def insert_invoice(conn, job):
    return conn.execute(
        "INSERT INTO invoice (job, customer, amount) VALUES (%s, %s, %s) RETURNING no",
        (job.id, job.customer, job.amount),
    ).fetchone()[0]
