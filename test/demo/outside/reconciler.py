"""Decides what nobody knows, by looking where the effect would be."""

import json

import psycopg

from outside import mail

# Nobody who held a lease can still be sending after this: by then the server
# has hung up on them.
PATIENCE = "0.75 s"

WAITING = """
    SELECT key, token, idem_provider_key(key, %s)::text
      FROM idem_uncertain
     WHERE overdue > %s
"""
HAPPENED = "SELECT token FROM idem_resolve(%s, true, %s::json)"
DID_NOT = "SELECT token FROM idem_resolve(%s, false)"


def settle(conn, destination):
    """Returns the keys of messages that were there, and of those that were not."""
    there, not_there = [], []
    waiting = conn.execute(WAITING, (destination.provider, PATIENCE)).fetchall()
    arrived = destination.arrived()  # looked at after the list: a later look
    for key, token, identity in waiting:
        try:
            with conn.transaction():
                if identity in arrived:
                    result = {"message_id": mail.message_id(identity)}
                    done = conn.execute(HAPPENED, (key, json.dumps(result)))
                else:
                    done = conn.execute(DID_NOT, (key,))
                if done.fetchone()[0] != token:
                    raise psycopg.Rollback  # it was leased anew since we looked
        except psycopg.Error as error:
            if error.sqlstate not in ("ID002", "ID005"):  # others were faster
                raise
        else:
            (there if identity in arrived else not_there).append(key)
    return there, not_there
