"""Destination two: a payment provider that knows idempotency keys.

POST /charges with a header Idempotency-Key makes a charge the first time, and
answers with that same charge whenever the key comes again.  It writes down each
request that it has answered.
"""

import contextlib
import http.client
import http.server
import json
import pathlib
import threading
from collections import Counter

from outside.wire import Refused, Strikable


class Payments:
    provider = "payments"
    retry_window = "23 hours"  # the provider keeps its keys for 24

    def __init__(self, directory):
        self.log = pathlib.Path(directory, "payments.log")
        self.log.touch()
        self.server = Server(("127.0.0.1", 0), Request)
        self.listener = self.server.socket
        self.port = self.server.server_address[1]

    def serve(self):
        with open(self.log, "a", buffering=1) as self.server.log:
            self.server.serve_forever()

    def connect(self, job, strike):
        return contextlib.closing(Session(strike, "127.0.0.1", self.port, timeout=10))

    def answered(self, replayed):
        """How often each identity was charged, or was answered once more."""
        found = Counter()
        for line in self.log.read_text().splitlines():
            entry = json.loads(line)
            found[entry["key"]] += entry["replayed"] == replayed
        return found

    def arrived(self):
        return self.answered(replayed=False)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *args):
        super().__init__(*args)
        self.lock = threading.Lock()
        self.charges = {}  # key -> (request, response)

    def charge(self, key, request):
        """Returns status and response."""
        with self.lock:
            replayed = key in self.charges
            if not replayed:
                self.charges[key] = request, {"charge": len(self.charges) + 1}
            first, response = self.charges[key]
            if request != first:
                return 422, {"error": "the key belongs to another request"}
            self.log.write(json.dumps({"key": key, "replayed": replayed}) + "\n")
        return 200 if replayed else 201, response


class Request(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) < length:
            return  # the client died in the middle of it
        status, response = self.server.charge(self.headers["Idempotency-Key"], body)
        with contextlib.suppress(OSError):  # nobody may be there to hear it
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(response).encode())

    def log_message(self, *_):
        pass


class Session(Strikable, http.client.HTTPConnection):
    END = b"}"

    def __init__(self, strike, *args, **options):
        self.strike = strike
        super().__init__(*args, **options)

    def perform(self, identity, job):
        """Charges.  OSError or HTTPException: nobody knows."""
        body = json.dumps({"customer": job.customer, "amount": job.amount})
        self.request("POST", "/charges", body.encode(), {"Idempotency-Key": identity})
        response = self.getresponse()
        answer = json.loads(response.read())
        if 400 <= response.status < 500:
            raise Refused(answer["error"])
        if response.status >= 500:
            raise http.client.HTTPException(response.status)
        return answer
