"""A connection on which a worker can be struck in the middle of sending."""


class Refused(Exception):
    """The destination said no: the effect is known not to have happened."""


class Strikable:
    """Goes before the class of a connection whose send() it breaks in two.

    `strike` is called with the point that was reached.
    """

    END: bytes  # what only the message ends with, of all that is sent

    def send(self, data):
        if isinstance(data, str) or not data.endswith(self.END):
            return super().send(data)
        middle = len(data) // 2
        super().send(data[:middle])
        self.strike("half sent")
        super().send(data[middle:])
        self.strike("unanswered")
