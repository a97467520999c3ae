"""A worker of the double-billing story.

It may be killed at any point, pauses when it is told to, and loses some
acknowledgements.
"""

import os
import random
import signal
import time

import jobs

PAUSE = 0.8  # seconds: its job will be delivered to another worker, too
LOST_ACKS = 0.03  # the share of deliveries whose acknowledgement is lost
LOST_ACK = 75  # the exit status of a worker that died over one


def work(schema, handler, seed, report):
    def pause(*_):  # wherever it is, as a stalled machine would
        report("paused")
        time.sleep(PAUSE)

    def handle(conn, job):
        ran, number = handler(conn, job)
        report("handled", job.id, int(ran), number)

        # A lost acknowledgement: the work is committed, the queue never hears
        # of it.  Which ones are lost depends on the seed alone, not on timing.
        if random.Random(f"{seed}/{job.id}/{job.delivery}").random() < LOST_ACKS:
            os._exit(LOST_ACK)

        jobs.acknowledge(conn, job)
        report("acked", job.id)

    signal.signal(signal.SIGUSR1, pause)
    jobs.work_off(schema, handle, report)
