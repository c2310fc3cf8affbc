"""Who may come in: a worker that proves to know the run's token, and to which the server has proved the same."""

from fairseq_async.errors import RefusedError
from fairseq_async.exchange.authentication import challenge, proof, proves
from fairseq_async.exchange.messages import LARGEST
from fairseq_async.server.members import Members, Peer
from fairseq_async.server.plan import Message

SMALL = 1 << 10  # bytes that a stranger may send at a time


class Door:
    """The handshake of a new connection: a challenge from here, proof and challenge from there, proof from here.

    Args:
        token: what both sides know.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._server = challenge()  # another after each restart

    def greet(self, peer: Peer) -> Message:
        """The first message on a connection."""
        peer.challenge = challenge()
        return {"challenge": peer.challenge}

    def introduce(self, peer: Peer, message: Message, members: Members) -> Message:
        """Gives the peer its worker's id.

        Raises:
            RefusedError: the proof is wrong, or there is no place for this worker.
        """
        if message.get("kind") != "introduce":
            raise RefusedError("introduce yourself first")
        theirs, instance = str(message["challenge"]), str(message["instance"])[:64]
        if not proves(message["proof"], self._token, "worker", peer.challenge, theirs):
            raise RefusedError("this server belongs to another run (wrong token)")
        asked = None if message["worker"] is None else int(message["worker"])
        peer.worker, peer.instance = members.number(asked, message["joins"] is True, instance), instance
        peer.channel.largest = LARGEST
        own = proof(self._token, "server", peer.challenge, theirs)
        here = {"server": self._server, "workers": members.announced, "timeout": members.timeout}
        return {"proof": own, "worker": peer.worker} | here
