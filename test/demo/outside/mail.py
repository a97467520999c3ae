"""Destination one: a mail server that delivers into a folder.

It takes whatever comes, as often as it comes, like any mail server.  The only
identity of a message is its Message-ID, which nobody compares; but one can look
for it in the folder.

It hangs up on a client that keeps silent, as mail servers do (after five
minutes; here sooner).  That is what keeps a sender that was frozen for long from
sending when nobody expects it any more: it connects and says for whom the
message is, then takes its lease, and then has little time left.
"""

import asyncio
import email.message
import email.parser
import email.policy
import mailbox
import os
import pathlib
import smtplib
import socket
from collections import Counter

import aiosmtpd.handlers
import aiosmtpd.smtp

from outside.wire import Refused, Strikable

SILENCE = 0.5  # seconds
DOMAIN = "idem.example"
NO_DELAY = socket.IPPROTO_TCP, socket.TCP_NODELAY, 1


def message_id(identity):
    return f"<{identity}@{DOMAIN}>"


class Mail:
    provider = "mail"
    retry_window = None  # it remembers nothing, so no time is safer than another

    def __init__(self, directory):
        self.folder = pathlib.Path(directory, "mailbox")
        mailbox.Maildir(self.folder)  # makes it
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.listener.setsockopt(*NO_DELAY)  # for all that it accepts
        self.port = self.listener.getsockname()[1]

    def serve(self):
        asyncio.run(self.listen())

    async def listen(self):
        deliver = aiosmtpd.handlers.Mailbox(self.folder)

        def session():
            return aiosmtpd.smtp.SMTP(
                deliver,
                timeout=SILENCE,
                hostname="localhost",
                loop=asyncio.get_running_loop(),
            )

        server = await asyncio.get_running_loop().create_server(
            session, sock=self.listener
        )
        await server.serve_forever()

    def connect(self, job, strike):
        """A session that has named its recipient: all that can be taken back."""
        session = Session(strike, "127.0.0.1", self.port, "localhost", timeout=10)
        session.ehlo_or_helo_if_needed()
        session.mail(f"billing@{DOMAIN}")
        session.rcpt(recipient(job))
        return session

    def arrived(self):
        """How often each identity is in the folder."""
        parser = email.parser.BytesHeaderParser()
        found = Counter()
        for entry in os.scandir(self.folder / "new"):
            with open(entry, "rb") as file:
                found[parser.parse(file)["Message-ID"].strip()[1:].split("@")[0]] += 1
        return found


class Session(Strikable, smtplib.SMTP):
    END = b"\r\n.\r\n"

    def __init__(self, strike, *args, **options):
        self.strike = strike
        super().__init__(*args, **options)
        self.sock.setsockopt(*NO_DELAY)  # since a message is sent in two halves

    def perform(self, identity, job):
        """Sends the message.  OSError: nobody knows."""
        message = email.message.EmailMessage(email.policy.SMTP)
        message["From"] = f"billing@{DOMAIN}"
        message["To"] = recipient(job)
        message["Subject"] = f"Receipt {job.id}"
        message["Message-ID"] = message_id(identity)
        message.set_content(f"Thank you for {job.amount / 100:.2f}.\n")
        try:
            code, text = self.data(message.as_bytes())
        except smtplib.SMTPDataError as error:
            raise Refused(str(error)) from error
        if code != 250:
            raise Refused(f"{code} {text}")
        return {"message_id": message_id(identity)}


def recipient(job):
    return f"{job.customer.replace(' ', '-')}@{DOMAIN}"
